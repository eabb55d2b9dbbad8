"""The default model from its GGUF file against transformers' own dequantised load of the same file, in float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock import LLM, SamplingParams

COUNT = 64
TIE = 1e-4
"""Two logits closer than this are a tie: which of them wins is a matter of rounding, and no error."""

VECTOR_ERROR = 1e-5
"""Of a vector's length, in float32: 1.4e-6 was seen."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Deutschland",
    "In the beginning",
    "The quick brown fox",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "Q: What is photosynthesis?\nA:",
    "She opened the door and",
    "The three laws of motion",
    "La vie est",
    "To be, or not to be",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nList three colours.<|im_end|>\n<|im_start|>assistant\n",
    "x = [i**2 for i in range(10)]\nprint(x)\n# Output:",
    "🙂🙃 emoji are",
    "SELECT name FROM users WHERE",
]

pytestmark = pytest.mark.model


class PlainReader(gguf.GGUFReader):
    """Cuts its half a million pieces from a plain array: cutting one from a memmap costs ten times as much."""

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, whole: np.memmap) -> None:
        self._plain = whole.view(np.ndarray)


@pytest.fixture(scope="module")
def read_once() -> Iterator[None]:
    """Have the package `gguf` parse the file once, and list the names of tensors once.

    transformers has it do so for the settings, the weights and the tokenizer, and for each of the model's 397 modules,
    which takes four fifths of half a minute. What is read is the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(PlainReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="module")
def reference(default_model: Path, read_once):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def llm(default_model: Path):
    with LLM(str(default_model), dtype="float32", kv_cache_memory=200_000_000) as llm:
        yield llm


@pytest.mark.parametrize("prompts", [PROMPTS[::8], pytest.param(PROMPTS, marks=pytest.mark.deep)], ids=["some", "all"])
def test_greedy_text_is_transformers_up_to_ties(llm, reference, prompts):
    """By induction: each token must be the reference's best after the same prefix, or as good as its best."""
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    ties = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(tokens) == COUNT
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]  # [COUNT, V]
        best = logits.max(-1)
        short = best.values - logits[torch.arange(COUNT), torch.tensor(tokens)]
        ties += [(output.prompt, int(step), float(short[step])) for step in torch.nonzero(short > 0)]
    print(f"{len(ties)} ties in {len(prompts) * COUNT} tokens: {ties}")
    assert all(gap < TIE for _, _, gap in ties)


def test_logprobs_are_the_reference_distribution(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
    [output] = llm.generate("The capital of France is", params, use_tqdm=False)
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(16), torch.tensor(tokens)]
    found = torch.tensor(
        [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_conversation_template_is_transformers(llm, default_model: Path, read_once):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert output.prompt == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def pooled(reference, tokens, pooling):
    """transformers' last hidden states, pooled: `[H]`."""
    with torch.no_grad():
        states = reference.model(torch.tensor([tokens])).last_hidden_state[0]
    return states.mean(0) if pooling == "mean" else states[-1]


@pytest.mark.parametrize(
    ("pooling", "normalize", "dimensions"), [("mean", False, None), ("mean", True, 100), ("last", True, None)]
)
def test_embeddings_are_the_pooled_hidden_states_of_the_reference(llm, reference, pooling, normalize, dimensions):
    options = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
    for output in llm.embed(PROMPTS[:6], **options, use_tqdm=False):
        expected = pooled(reference, output.prompt_token_ids, pooling)[:dimensions]
        if normalize:
            expected = expected / expected.norm()
        found = torch.tensor(output.outputs.embedding)
        assert found.shape == expected.shape
        assert (found - expected).norm() <= VECTOR_ERROR * expected.norm()


def test_embeddings_of_the_served_form_point_where_the_reference_points(default_model, reference):
    with LLM(str(default_model), kv_cache_memory=50_000_000) as served:
        for pooling in ("mean", "last"):
            for output in served.embed(PROMPTS[:6], pooling=pooling, use_tqdm=False):
                expected = pooled(reference, output.prompt_token_ids, pooling)
                found = torch.tensor(output.outputs.embedding)
                assert torch.cosine_similarity(found, expected, 0) > 0.999
