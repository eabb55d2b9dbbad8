"""The prompt as an answer's first output: before every choice, with its scores where they were asked for."""

from __future__ import annotations

import math

import pytest
from engine_harness import Scoring, build

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, PromptTokens
from penstock.contract.request import EngineRequest, StopRules, TextPrompt
from penstock.contract.sampling import SamplingSpec

PROMPT = "the quick brown fox jumps"


def answered(*, echo=False, scores=False, n=1, prompt=PROMPT, others=0, **scheduler):
    harness = build(around=Scoring, **{"max_num_batched_tokens": 8} | scheduler)
    for _ in range(others):
        harness.submit(PROMPT, max_tokens=30)
    spec = SamplingSpec((("prompt_logprobs", 1), ("seed", 7))) if scores else SamplingSpec((("seed", 7),))
    rules = StopRules(max_tokens=5, ignore_eos=True)
    request_id = harness.submit_request(
        EngineRequest("a", TextPrompt(prompt), n=n, sampling=spec, stop=rules, echo=echo)
    )
    return harness, request_id


@pytest.mark.parametrize("others", [0, 3])  # which compute the same prompt earlier: none of it may be skipped
@pytest.mark.parametrize("n", [1, 3])
def test_scores_of_every_token_come_once_and_before_every_choice(n, others):
    harness, request_id = answered(scores=True, n=n, others=others)
    harness.run()
    first, *rest = harness.outputs[request_id]
    assert isinstance(first, PromptTokens)
    assert first.text == PROMPT == "".join(piece.text for piece in first.tokens)
    assert math.isnan(first.tokens[0].logprob)
    assert [piece.logprob for piece in first.tokens[1:]] == [-float(place) for place in range(1, len(PROMPT))]
    assert all([top.id for top in piece.top] == [2] for piece in first.tokens[1:])
    assert not any(isinstance(output, PromptTokens) for output in rest)
    assert sum(isinstance(output, ChoiceFinished) for output in rest) == n
    for choice in range(n):
        tokens = [t.id for o in rest if isinstance(o, ChoiceDelta) and o.choice == choice for t in o.tokens]
        assert tuple(tokens) == harness.expected(PROMPT, 5, choice=choice)


def test_scores_survive_preemption():
    harness, request_id = answered(scores=True, others=3, num_blocks=20)
    harness.run()
    assert harness.engine.scheduler.stats.preemptions > 0
    assert len(harness.outputs[request_id][0].tokens) == len(PROMPT)


def test_an_echo_without_scores_waits_for_nothing():
    harness, request_id = answered(echo=True)
    harness.step()
    assert [type(output) for output in harness.outputs[request_id]] == [PromptTokens]
    assert all(math.isnan(piece.logprob) for piece in harness.outputs[request_id][0].tokens)


def test_without_echo_or_scores_there_is_no_prompt():
    harness, request_id = answered()
    harness.run()
    assert not any(isinstance(output, PromptTokens) for output in harness.outputs[request_id])


def test_a_prompt_of_one_token_has_nothing_to_score():
    harness, request_id = answered(scores=True, prompt="a")
    harness.run()
    assert len(harness.outputs[request_id][0].tokens) == 1


def test_an_abort_before_the_prompt_is_scored_ends_every_choice_once():
    harness, request_id = answered(scores=True, n=2)
    harness.step()
    harness.collect(harness.engine.abort(request_id))
    ends = [output for output in harness.outputs[request_id] if isinstance(output, ChoiceFinished)]
    assert [(end.choice, end.reason) for end in ends] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
