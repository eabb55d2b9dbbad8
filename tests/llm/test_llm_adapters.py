"""Adapters through the library: many in one batch, each answer as alone, whatever else is computed and however."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from llm_harness import OPTIONS
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock import LLM, SamplingParams
from penstock.contract.errors import ConfigError, InvalidParameter, UnknownModel
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

RANKS = (2, 4, 8, 16)
PROMPTS = ["the sea", "once upon a time, there was", "a", "yes or no, and why not. or", "the sea and the land"]
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 40, "max_model_len": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("adapted")
    return write_lettered(directory, "llama", "wide_heads_untied", intermediate_size=96)


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> dict[str, str]:
    """Eight adapters, two of each of four ranks; half of them for attention only."""
    every = linear_modules(load_with_adapters(model).program)
    some = {name: size for name, size in every.items() if "self_attn" in name}
    folder = tmp_path_factory.mktemp("adapters")
    return {
        f"adapter-{at}": str(write_adapter(folder / str(at), some if at % 2 else every, RANKS[at % 4], seed=at))
        for at in range(8)
    }


def requests(count: int) -> list[tuple[str, SamplingParams]]:
    return [
        (
            f"{PROMPTS[at % len(PROMPTS)]} {'abcdefgh'[at % 7]}",
            SamplingParams(
                temperature=0.0 if at % 3 else 1.0, seed=at, max_tokens=3 + at % 9, ignore_eos=True, logprobs=1
            ),
        )
        for at in range(count)
    ]


def told(outputs) -> list[object]:
    """Tokens and the log probability of each, to the bit."""
    return [
        [(token, of[token].logprob) for token, of in zip(each.token_ids, each.logprobs, strict=True)]
        for output in outputs
        for each in output.outputs
    ]


def made(llm: LLM, asked, names) -> list[object]:
    prompts, params = zip(*asked, strict=True)
    return told(llm.generate(list(prompts), list(params), adapter=list(names), use_tqdm=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_adapters_interleaved_over_200_requests_answer_as_each_alone(model, adapters, dtype):
    names = [("", *adapters)[at % 9] for at in range(200)]
    asked = requests(200)
    options = OPTIONS | SIZES | {"dtype": dtype}
    with LLM(str(model), lora=adapters, **options) as llm:
        together = made(llm, asked, names)
    with LLM(str(model), lora=adapters, **options | {"max_num_seqs": 1, "prefix_caching": False}) as llm:
        alone = [answer for each, name in zip(asked, names, strict=True) for answer in made(llm, [each], [name])]
    assert together == alone
    with LLM(str(model), **options) as llm:
        bare = made(llm, asked, itertools.repeat("", 200))
    same = [one == other for one, other in zip(together, bare, strict=True)]
    assert all(same[0::9]), "without an adapter it is the model's own answer"
    assert not any(same[at] for at in range(200) if at % 9), "every adapter makes a difference"


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"kv_cache_memory": 60_000, "max_model_len": 48},
        {"prefix_caching": False, "speculate": False},
    ],
)
def test_neither_threads_nor_chunks_nor_memory_change_a_bit(model, adapters, options):
    names, asked = [("", *adapters)[at % 9] for at in range(27)], requests(27)
    with LLM(str(model), lora=adapters, **OPTIONS | SIZES) as llm:
        expected = made(llm, asked, names)
    with LLM(str(model), lora=adapters, **OPTIONS | SIZES | options) as llm:
        for _ in range(2):  # the second time with whatever is cached
            assert made(llm, asked, names) == expected


def test_prompts_are_cached_for_each_adapter_apart(model, adapters):
    prompt = "once upon a time, there was a sea and a land, and a"
    greedy = SamplingParams(temperature=0, max_tokens=2)
    with LLM(str(model), lora=adapters, **OPTIONS) as llm:
        hits = []
        for name in ("", "adapter-1", "adapter-2", "adapter-1", ""):
            before = llm.scheduler.stats.hit_tokens
            llm.generate(prompt, greedy, adapter=name, use_tqdm=False)
            hits.append(llm.scheduler.stats.hit_tokens - before)
    assert hits[:3] == [0, 0, 0]
    assert min(hits[3:]) > 0


def test_an_adapter_may_embed(model, adapters):
    with LLM(str(model), lora=adapters, **OPTIONS) as llm:
        vectors = [
            llm.embed("the sea", adapter=name, use_tqdm=False)[0].outputs.embedding for name in ("", "adapter-0")
        ]
    assert vectors[0] != vectors[1]


def test_options_and_names_that_cannot_be_used_are_refused(model, adapters, tmp_path):
    path = adapters["adapter-0"]
    with pytest.raises(ConfigError, match="max_loras"):
        LLM(str(model), lora=adapters, max_loras=7, **OPTIONS)
    for wrong in ("poet", f"={path}", ("a=x", "a=y")):
        with pytest.raises(ConfigError) as refused:
            LLM(str(model), lora=(wrong,) if isinstance(wrong, str) else wrong, **OPTIONS)
        assert refused.value.option == "lora"
    with pytest.raises(ConfigError, match="--max-lora-rank") as refused:
        LLM(str(model), lora={"poet": adapters["adapter-3"]}, max_lora_rank=8, **OPTIONS)
    assert refused.value.option == "lora"
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(str(model), lora={"poet": str(tmp_path / "nowhere")}, **OPTIONS)
    with pytest.raises(ConfigError, match="lora_dir"):
        LLM(str(model), lora_dir=str(tmp_path), **OPTIONS)
    other = write_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj": (120, 49)}, 4)
    with pytest.raises(ConfigError, match=r"49 inputs and 120 outputs"):
        LLM(str(model), lora={"poet": str(other)}, **OPTIONS)
    stranger = write_adapter(tmp_path / "stranger", {"model.layers.9.self_attn.q_proj": (120, 48)}, 4)
    with pytest.raises(ConfigError, match=r"model.layers.9.self_attn.q_proj.*no linear module"):
        LLM(str(model), lora={"poet": str(stranger)}, **OPTIONS)
    with LLM(str(model), lora={"poet": path}, **OPTIONS) as llm:
        assert any(line.startswith("adapter          poet: ") for line in llm.report)
        with pytest.raises(UnknownModel):
            llm.generate("a", adapter="painter", use_tqdm=False)
        with pytest.raises(InvalidParameter, match="entries"):
            llm.generate(["a", "b"], adapter=["poet"], use_tqdm=False)
