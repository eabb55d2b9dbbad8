"""`best_of`: more choices are generated than answered, and the best of them are answered."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from engine_harness import build, finishes_of, request_of, terminal_of, text_of, tokens_of

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, FinishReason, PromptTokens, RequestFailed
from penstock.contract.sampling import SamplingSpec

PROMPT = "hello"


def run(n, best_of, *, stop_at=None, **rules):
    harness = build()
    one = request_of("a", harness.text, PROMPT, n=n, **rules)
    harness.submit_request(replace(one, best_of=best_of))
    if stop_at is None:
        harness.run()
    return harness, harness.outputs["a"]


def of_each(harness, count, tokens=8):
    """The candidates' tokens, by log probability per token; a token's is minus one over one plus the token."""
    whole = [harness.expected(PROMPT, tokens, choice=choice) for choice in range(count)]
    return sorted(whole, key=lambda them: -sum(-1 / (1 + token) for token in them) / len(them))


@pytest.mark.parametrize(("n", "best_of"), [(1, 4), (2, 5), (3, 16)])
def test_the_n_with_the_highest_log_probability_per_token_are_answered_best_first(n, best_of):
    harness, outputs = run(n, best_of)
    expected = of_each(harness, best_of)[:n]
    assert len(set(expected)) == n
    assert [tokens_of(outputs, choice) for choice in range(n)] == expected
    assert [text_of(outputs, choice) for choice in range(n)] == [harness.spelled(them) for them in expected]
    assert [(end.choice, end.reason) for end in finishes_of(outputs)] == [(c, FinishReason.LENGTH) for c in range(n)]


def test_every_candidate_counts_as_usage_and_nothing_is_told_before_all_are_complete():
    _, outputs = run(2, 5)
    assert terminal_of(outputs).usage.completion_tokens == 5 * 8
    assert sum(isinstance(output, ChoiceDelta) for output in outputs) == 2


def test_lengths_do_not_count_only_the_mean_does():
    stop = "aeiouhstrn"  # some candidates stop early
    _, outputs = run(1, 12, strings=tuple(stop[:4]))
    plain = build()
    plain.submit(PROMPT, n=12, strings=tuple(stop[:4]))
    plain.run()
    whole = [tokens_of(plain.outputs["request-0"], choice) for choice in range(12)]
    means = [sum(-1 / (1 + token) for token in them) / len(them) if them else -math.inf for them in whole]
    assert len({len(them) for them in whole}) > 1
    assert tokens_of(outputs) == whole[means.index(max(means))]


@pytest.mark.parametrize("best_of", [None, 2])
def test_as_many_as_n_are_answered_as_if_nothing_had_been_said(best_of):
    _, outputs = run(2, best_of)
    plain = build()
    plain.submit(PROMPT, n=2)
    plain.run()
    *pieces, end = plain.outputs["request-0"]
    assert outputs[:-1] == pieces
    assert terminal_of(outputs).usage == end.usage


def test_an_aborted_request_ends_with_the_best_so_far_and_gives_everything_back():
    harness, outputs = run(2, 4, stop_at=3)
    for _ in range(3):
        harness.step()
    harness.collect(harness.engine.abort("a"))
    assert [(end.choice, end.reason) for end in finishes_of(outputs)] == [(c, FinishReason.ABORT) for c in range(2)]
    assert terminal_of(outputs).usage.completion_tokens > len(tokens_of(outputs)) + len(tokens_of(outputs, 1))
    harness.engine.scheduler.check()
    assert harness.engine.scheduler.stats.free_blocks == harness.config.num_blocks
    assert not harness.engine._rankers


def test_a_request_that_fails_fails_alone_and_at_once():
    harness, outputs = run(1, 3, stop_at=0)
    harness.step()
    harness.collect(harness.engine.die("the end"))
    assert [type(output) for output in outputs] == [RequestFailed]
    assert not harness.engine._rankers


def test_the_prompt_is_told_at_once_and_once():
    harness = build()
    one = request_of("a", harness.text, PROMPT, n=1)
    harness.submit_request(replace(one, best_of=3, echo=True))
    harness.step()
    assert [type(output) for output in harness.outputs["a"]] == [PromptTokens]
    harness.run()
    assert tokens_of(harness.outputs["a"]) == of_each(harness, 3)[0]


def test_candidates_are_judged_by_log_probabilities_that_nobody_else_asked_for():
    harness = build()
    one = request_of("a", harness.text, PROMPT, n=1)
    resolve = harness.intake.resolve
    assert [r.sampling.has("logprobs") for r in resolve(replace(one, best_of=2)).sequences] == [True, True]
    assert not resolve(one).sequences[0].sampling.has("logprobs")
    asked = replace(one, best_of=2, sampling=SamplingSpec((("logprobs", 3), ("seed", 1))))
    assert resolve(asked).sequences[0].sampling.get("logprobs", 0) == 3


@pytest.mark.parametrize("best_of", [1, 17])
def test_fewer_than_n_and_more_than_the_limit_are_refused(best_of):
    harness = build()
    one = request_of("a", harness.text, PROMPT, n=2)
    with pytest.raises(InvalidParameter, match="best_of"):
        harness.intake.resolve(replace(one, best_of=best_of))
