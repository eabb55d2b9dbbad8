"""Sequences that are embedded: they end with their prompt, never sample, and a mean computes every position."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_harness import Harness, config, embedding, request, run_episode

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import EngineFault, InvalidParameter, PromptTooLong
from penstock.contract.events import Admitted, Embedded, Finished, FinishReason
from penstock.contract.plan import RowResult, SampledToken, StepResult
from penstock.contract.request import StopRules
from penstock.core.scheduler import Scheduler
from penstock.sim.fake_model import golden_embedding

BOTH = pytest.mark.parametrize("pooling", list(Pooling))


@BOTH
def test_it_ends_with_its_prompt_and_no_row_of_it_samples(pooling):
    harness = Harness(config(max_num_batched_tokens=4))
    harness.submit(embedding("a", range(10), pooling))
    shapes, events = [], ()
    while harness.scheduler.has_work:
        (row,) = harness.plan().rows
        shapes.append((row.start, row.count, row.sample))
        events += harness.commit()
    assert shapes == [(0, 4, False), (4, 4, False), (8, 2, False)]
    vector = golden_embedding(range(10), pooling)
    assert events == (Admitted("a", 0), Embedded("a", vector), Finished("a", FinishReason.STOP))
    assert harness.scheduler.stats.free_blocks == 32
    harness.drain()


def test_a_mean_skips_nothing_and_the_last_state_takes_what_is_cached():
    harness = Harness(config())
    prompt = tuple(range(13))
    for name, pooling in (("a", Pooling.MEAN), ("b", Pooling.LAST), ("c", Pooling.MEAN), ("d", Pooling.LAST)):
        harness.submit(embedding(name, prompt, pooling))
        harness.drain()
    assert harness.admitted == {"a": 0, "b": 12, "c": 0, "d": 12}
    assert harness.vectors["a"] == harness.vectors["c"] != harness.vectors["b"] == harness.vectors["d"]


def test_what_an_embedding_computed_serves_who_generates_and_the_other_way_round():
    harness = Harness(config())
    harness.submit(embedding("a", range(12)))
    harness.drain()
    harness.submit(request("b", range(16)))
    harness.drain()
    harness.submit(embedding("c", range(16), Pooling.LAST))
    harness.drain()
    assert harness.admitted == {"a": 0, "b": 12, "c": 12}


def test_a_prompt_may_fill_the_context_and_no_more():
    harness = Harness(config(max_model_len=20))
    harness.submit(embedding("a", range(20)))
    harness.drain()
    with pytest.raises(PromptTooLong) as caught:
        harness.submit(embedding("b", range(21)))
    assert "at least one token" not in str(caught.value)


def test_it_leases_no_more_than_its_prompt():
    harness = Harness(config(num_blocks=3, max_model_len=12))
    harness.submit(embedding("a", range(12)))
    assert harness.plan().rows[0].count == 12
    harness.commit()
    harness.drain()


@BOTH
def test_a_preempted_one_starts_anew_and_comes_to_the_same(pooling):
    harness = Harness(config(num_blocks=8, max_num_batched_tokens=4, max_num_seqs=2))
    harness.submit(request("elder", range(6), max_tokens=20))
    for _ in range(3):
        harness.step()
    harness.submit(embedding("a", [9] * 18, pooling))
    harness.drain()
    assert harness.scheduler.stats.preemptions > 0
    assert harness.vectors["a"] == golden_embedding([9] * 18, pooling)


def test_an_aborted_ones_vector_is_dropped():
    harness = Harness(config())
    harness.submit(embedding("a", range(5)))
    harness.plan()
    harness.abort("a")
    assert harness.commit() == ()
    harness.drain()


def test_a_failure_ends_it_without_a_vector():
    harness = Harness(config())
    harness.submit(embedding("a", range(5)))
    harness.fail("a")
    assert harness.step() == (Admitted("a", 0), Finished("a", FinishReason.ERROR, message="planted"))
    harness.drain()


def test_a_mean_over_positions_that_may_be_cached_is_refused():
    scheduler = Scheduler(config())
    with pytest.raises(InvalidParameter, match="pooling"):
        scheduler.submit(replace(embedding("a", range(5)), fresh_prompt=False))
    with pytest.raises(InvalidParameter, match="max_tokens"):
        scheduler.submit(replace(embedding("a", range(5)), stop=StopRules(max_tokens=1)))
    assert not scheduler.has_work


@pytest.mark.parametrize(
    "result",
    [
        StepResult(0),
        StepResult(0, (RowResult(0, (SampledToken(3),), embedding=b""),)),
        StepResult(0, (RowResult(1, embedding=b""),)),
        StepResult(0, (RowResult(0, embedding=b""), RowResult(0, embedding=b""))),
        StepResult(0, (RowResult(0, embedding=b"", failure="x"),)),
    ],
)
def test_a_result_without_the_vectors_that_are_due_is_refused_and_changes_nothing(result):
    scheduler = Scheduler(config())
    scheduler.submit(embedding("a", range(5)))
    plan = scheduler.plan()
    with pytest.raises(EngineFault, match="step 0"):
        scheduler.commit(plan, result)
    events = scheduler.commit(plan, StepResult(0, (RowResult(0, embedding=b"v"),)))
    assert events[1] == Embedded("a", b"v")


def test_the_random_episodes_embed_by_both_poolings():
    seen = set()
    for seed in range(20):
        harness = run_episode(seed)
        seen |= {harness.requests[name].embedding for name in harness.vectors}
    assert seen == {EmbeddingSpec(pooling) for pooling in Pooling}
