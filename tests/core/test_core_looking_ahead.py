"""Models whose tokens look ahead: a prompt is planned whole, or waits for a step that holds it."""

from __future__ import annotations

import pytest
from core_harness import VOCAB, Harness, config, embedding, request

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import ConfigError, InvalidParameter, PromptTooLong
from penstock.contract.events import Embedded, Finished, FinishReason
from penstock.contract.plan import Admit, Row, StallReason, StepPlan
from penstock.contract.sampling import NEUTRAL
from penstock.core.scheduler import Scheduler
from penstock.sim import FakeRunner, PlanViolation
from penstock.sim.fake_model import golden_embedding


def ahead(num_blocks=32, **options):
    defaults = {"max_model_len": 16, "prefix_caching": False, "looks_ahead": True}
    return config(num_blocks, **{**defaults, **options})


def test_a_prompt_is_one_row_and_waits_for_a_step_that_holds_it():
    harness = Harness(ahead())
    for name, length in (("a", 9), ("b", 12), ("c", 4), ("d", 16)):
        harness.submit(embedding(name, range(length)))
    shapes = []
    while harness.scheduler.has_work:
        plan = harness.plan()
        shapes.append([(row.start, row.count) for row in plan.rows])
        for stall in plan.stalls:
            assert (stall.reason, stall.have) == (StallReason.NO_BUDGET, 16 - sum(row.count for row in plan.rows))
        harness.commit()
    assert shapes == [[(0, 9)], [(0, 12), (0, 4)], [(0, 16)]]
    assert harness.vectors == {
        name: golden_embedding(range(length), Pooling.MEAN)
        for name, length in (("a", 9), ("b", 12), ("c", 4), ("d", 16))
    }


@pytest.mark.parametrize("pooling", list(Pooling))
def test_nothing_is_kept_of_a_prompt(pooling):
    harness = Harness(ahead())
    for name in "ab":
        harness.submit(embedding(name, range(16), pooling))
        harness.drain()
    assert harness.admitted == {"a": 0, "b": 0}
    assert harness.scheduler.stats.cached_blocks == 0


def test_few_blocks_let_prompts_wait_and_none_is_preempted():
    harness = Harness(ahead(num_blocks=4, max_num_batched_tokens=40))
    for name in "abcdef":
        harness.submit(embedding(name, range(ord(name) - 90)))
    harness.drain()
    assert len(harness.vectors) == 6
    assert harness.scheduler.stats.preemptions == 0


def test_a_step_that_is_taken_back_is_planned_whole_again():
    harness = Harness(ahead())
    harness.submit(embedding("a", range(10)))
    first = harness.plan()
    harness.scheduler.drop_in_flight()
    again = harness.scheduler.plan()
    assert [(row.start, row.count) for row in again.rows] == [(row.start, row.count) for row in first.rows]


def test_an_aborted_one_leaves_room():
    harness = Harness(ahead(num_blocks=4))
    harness.submit(embedding("a", range(16)))
    harness.plan()
    harness.abort("a")
    harness.commit()
    harness.submit(embedding("b", range(16)))
    events = [event for _ in range(3) for event in harness.step()]
    assert Embedded("b", golden_embedding(range(16), Pooling.MEAN)) in events
    assert Finished("b", FinishReason.STOP) in events


def test_what_would_generate_or_does_not_fit_a_step_is_refused():
    scheduler = Scheduler(ahead())
    with pytest.raises(InvalidParameter, match="embedding: must be given"):
        scheduler.submit(request("a"))
    with pytest.raises(PromptTooLong):
        scheduler.submit(embedding("a", range(17)))
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 17}, "max_num_batched_tokens: 16 is below max_model_len"),
        ({"prefix_caching": True}, "prefix_caching: must not be set"),
        ({"window": 5}, "window: must not be set"),
        ({"checkpoints": 0}, "checkpoints: must not be set"),
    ],
)
def test_settings_that_would_part_a_prompt_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ahead(**options)


def test_the_fake_runner_refuses_a_part_of_a_prompt():
    admit = Admit(0, "a", tuple(range(10)), (0, 1, 2), 0, NEUTRAL, 0, embedding=EmbeddingSpec())
    plan = StepPlan(0, (), (admit,), (Row(0, 0, 4, (), False),))
    with pytest.raises(PlanViolation, match="looks ahead, and has a part of its prompt"):
        FakeRunner(ahead(), VOCAB).run(plan)
    FakeRunner(config(), VOCAB).run(plan)
