"""`--draft-model`, from option to answer: only times differ, even if a runner is lost; what cannot work is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import httpx
import pytest
from served import PATIENCE, runner_of, serve
from test_e2e_runner_process import ASKED, streamed, wait_for_another
from tiny_checkpoints import write_checkpoint, write_lettered, write_letters

from needs import COMPILED
from penstock import LLM, SamplingParams, app, draft_loading
from penstock.contract.errors import ConfigError
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.draft_chances import MODEL
from penstock.core.replaying import replay
from penstock.kernels import native

compiled = pytest.mark.skipif(not native.available(), reason=COMPILED)
OPTIONS = {"kv_cache_memory": 40_000_000, "threads": 1}
STATEFUL = ("granitemoehybrid", "wide_heads_untied_factors")
SAMPLED = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=5, max_tokens=24, logprobs=1)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_lettered(tmp_path_factory.mktemp("tiny") / "llama", "llama", "wide_heads_untied"))


def answers(llm: LLM) -> list[tuple[tuple[int, ...], object]]:
    prompts = [[n, *range(3, 20)] for n in range(3, 9)]
    said = [llm.generate(prompts, params, use_tqdm=False) for params in SAMPLED]
    return [(tuple(each.outputs[0].token_ids), each.outputs[0].logprobs) for of in said for each in of]


def guessed(llm: LLM) -> tuple[int, int]:
    """How many tokens guessed by the draft model were computed, and how many were right."""
    counts = dict(llm._engine.measurements().drafts)
    return (counts[MODEL].tokens, counts[MODEL].accepted) if MODEL in counts else (0, 0)


@compiled
@pytest.mark.model
@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"),
    [
        ("auto", "auto"),
        *(
            pytest.param(*each, marks=pytest.mark.deep)
            for each in product(("auto", "none", "int8", "int4"), ("auto", "int8"))
            if each not in {("auto", "auto"), ("none", "int8")}
        ),
    ],
)
def test_in_every_weight_form_the_model_guesses_right_for_itself(
    default_model, quantization, kv_cache_dtype, monkeypatch
):
    """All guesses are computed, whatever they cost."""
    monkeypatch.setattr(app, "SchedulerConfig", partial(SchedulerConfig, weigh_drafts=False))
    options = OPTIONS | {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "threads": 2}
    with LLM(str(default_model), speculate=False, **options) as llm:
        want = answers(llm)
    with LLM(str(default_model), draft_model=str(default_model), **options) as llm:
        assert answers(llm) == want
        drafted, right = guessed(llm)
        assert drafted == right > 0
        assert any(line.startswith("draft weights") for line in llm.report)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc")
@pytest.mark.model
@pytest.mark.deep
def test_streams_go_on_to_the_bit_while_a_runner_with_a_draft_model_is_killed(default_model, tmp_path):
    trace = tmp_path / "trace"
    options = ("--draft-model", str(default_model), "--kv-cache-memory", "256MiB")
    with serve(trace, *options, forked=False) as served, ThreadPoolExecutor(len(ASKED)) as pool:
        model = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        bodies = [{"model": model, **body} for body in ASKED]
        want = [streamed(served.url, body) for body in bodies]
        httpx.post(f"{served.url}/reset_prefix_cache")
        streams = [pool.submit(streamed, served.url, body) for body in bodies]
        served.wait_running(1)
        killed = runner_of(served.process.pid)
        time.sleep(0.2)
        os.kill(killed, signal.SIGKILL)
        wait_for_another(served, killed)
        assert [stream.result(PATIENCE) for stream in streams] == want
        metrics = httpx.get(f"{served.url}/metrics").text
        assert int(re.search(r"penstock:runners_lost_total{[^}]*} (\d+)", metrics)[1]) == 1
        assert re.search(r'vllm:spec_decode_num_draft_tokens_total{[^}]*drafter="model"[^}]*} [1-9]', metrics)
    report = replay(trace.read_text(encoding="utf-8").splitlines(keepends=True))
    assert report.same, report.explain()


def refused(model: str, draft: str, **options) -> str:
    """The message that refuses a draft model."""
    with pytest.raises(ConfigError, match="draft_model") as error:
        LLM(model, draft_model=draft, **OPTIONS | options)
    assert error.value.option == "draft_model"
    return str(error.value)


def test_another_vocabulary_is_refused_though_it_is_as_large(tiny, tmp_path):
    other = write_lettered(tmp_path / "other", "llama", "wide_heads_untied")
    tokenizer = other / "tokenizer.json"
    text = tokenizer.read_text()
    swapped = text.replace('"a": 3', '"a": 0.5').replace('"b": 4', '"b": 3').replace('"a": 0.5', '"a": 4')
    assert swapped != text
    tokenizer.write_text(swapped)
    assert "token 3 is b'b', and b'a' to the model" in refused(tiny, str(other))


def test_a_vocabulary_of_another_size_is_refused(tiny, tmp_path):
    other = write_checkpoint(tmp_path / "other", "llama", "wide_heads_untied")
    write_letters(other, 64)
    assert "a vocabulary of 64 tokens, and the model one of 101" in refused(tiny, str(other))


def test_a_model_that_carries_state_does_not_guess(tiny, tmp_path):
    stateful = str(write_lettered(tmp_path / "state", *STATEFUL))
    assert "carries recurrent state" in refused(tiny, stateful)


@compiled
def test_for_a_model_that_carries_state_is_guessed(tmp_path, monkeypatch):
    stateful = str(write_lettered(tmp_path / "state", *STATEFUL))
    vocabulary = json.loads((Path(stateful) / "config.json").read_text())["vocab_size"]
    small = str(write_lettered(tmp_path / "small", "llama", "wide_heads_untied", vocab_size=vocabulary))
    monkeypatch.setattr(app, "SchedulerConfig", partial(SchedulerConfig, weigh_drafts=False))
    with LLM(stateful, speculate=False, **OPTIONS) as llm:
        want = answers(llm)
    with LLM(stateful, draft_model=small, **OPTIONS) as llm:
        assert answers(llm) == want
        assert guessed(llm)[0] > 0


def test_a_window_in_every_layer_leaves_blocks_behind_that_a_draft_model_would_need(tiny, tmp_path):
    windowed = str(write_lettered(tmp_path / "window", "mistral", "all_to_one_small_window"))
    assert "every layer of it has a window" in refused(windowed, tiny)


def test_what_does_not_fit_beside_the_model_is_refused_with_sizes(tiny, monkeypatch):
    monkeypatch.setattr(draft_loading, "free_memory", lambda device: 120_000_000)
    message = refused(tiny, tiny)
    assert "of memory are needed and" in message


def test_a_draft_model_without_guesses_would_do_nothing(tiny):
    with pytest.raises(ConfigError, match="draft_model: would do nothing"):
        LLM(tiny, draft_model=tiny, speculate=False)
