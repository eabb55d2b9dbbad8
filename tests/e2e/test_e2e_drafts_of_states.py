"""Drafts of models that carry recurrent state: not one bit of an answer differs, and many tokens are right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tiny_checkpoints import BYTE_VOCABULARY, VARIANTS, write_byte_tokenizer, write_checkpoint

from needs import COMPILED
from penstock import LLM, SamplingParams, app
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

OPTIONS = {"kv_cache_memory": "4MiB", "max_num_seqs": 4, "state_checkpoint_interval": 64, "threads": 1}
WORDS = random.Random(3)
PATTERN = [WORDS.randrange(3, 60) for _ in range(17)]
PROMPTS = [[*range(4, 4 + number), *PATTERN * 3, *PATTERN[: 5 + number]] for number in range(6)]
ASKED = [
    SamplingParams(temperature=0, max_tokens=70, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.2, seed=4, max_tokens=70, logprobs=0, n=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=60, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=60, structured_outputs={"regex": "(abc[a-e]{2}){10}"}),
    SamplingParams(temperature=0.9, seed=8, max_tokens=70, structured_outputs={"regex": "(hello [ab]{9}, ){3}"}),
    SamplingParams(temperature=0, max_tokens=40, min_tokens=20),
]


@pytest.fixture(scope="module", params=["lfm2", "granitemoehybrid", "qwen3_5_text"])
def model(request, tmp_path_factory) -> Path:
    folder, family = tmp_path_factory.mktemp("model"), request.param
    write_checkpoint(folder, family, next(iter(VARIANTS[family])), vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(folder)
    return folder


def answers(llm: LLM) -> Iterator[object]:
    """Everything that is said of each answer in two rounds; the second goes on from states that the first kept."""
    for _ in range(2):
        for output in llm.generate([{"prompt_token_ids": each} for each in PROMPTS], ASKED, use_tqdm=False):
            for one in output.outputs:
                yield one.token_ids, one.text, one.finish_reason, one.cumulative_logprob, one.logprobs


def test_no_bit_differs_and_some_guesses_are_right(model, monkeypatch):
    monkeypatch.setattr(app, "SchedulerConfig", partial(SchedulerConfig, weigh_drafts=False))
    with LLM(str(model), speculate=False, **OPTIONS) as llm:
        want, plain = list(answers(llm)), llm.scheduler.stats
        assert not any("for guesses" in line for line in llm.report)
    with LLM(str(model), **OPTIONS) as llm:
        assert list(answers(llm)) == want
        drafts, stats = dict(llm._engine.measurements().drafts), llm.scheduler.stats
        assert any("for guesses" in line for line in llm.report)
    assert {"suffix", "grammar"} <= drafts.keys(), drafts
    right, all_of = (sum(getattr(each, name) for each in drafts.values()) for name in ("accepted", "tokens"))
    assert 50 < right < all_of - 50, drafts
    assert stats.steps < plain.steps
    assert stats.hit_tokens == plain.hit_tokens, "where right drafts fill blocks, their states are kept as well"
