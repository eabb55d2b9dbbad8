"""Rows with drafts: right drafts are kept, wrong ones leave no trace, and no other row pays for either."""

from __future__ import annotations

import pytest
from core_harness import VOCAB, FakeDrafter, Harness, answer, config, embedding, request

from penstock.contract.errors import EngineFault
from penstock.contract.events import Admitted, DraftsJudged, Embedded, Finished, FinishReason, Generated
from penstock.contract.plan import Draft, Row, RowResult, SampledToken, StepResult
from penstock.core.scheduler import Scheduler


@pytest.mark.parametrize(("right", "count", "steps"), [(1.0, 3, 7), (1.0, 1, 13), (0.0, 3, 24)])
def test_drafts_that_are_right_save_steps_and_wrong_ones_cost_none(right, count, steps):
    harness = Harness(config(), FakeDrafter(right, count=count))
    harness.submit(request("a", (1, 2, 3), max_tokens=24))
    assert harness.drain() == steps


def test_a_row_ends_with_its_drafts_and_the_next_one_starts_behind_what_was_right():
    req = request("a", (1, 2, 3), max_tokens=9)
    tokens = answer(req, config())[0]
    harness = Harness(config())
    harness.submit(req)
    harness.step()
    wrong = (tokens[3] + 1) % 11
    plan = harness.scheduler.plan((Draft("a", (tokens[1], tokens[2], wrong, 0)),))
    assert plan.rows == (Row(0, 3, 5, (1,), True, (tokens[1], tokens[2], wrong, 0)),)
    judged, *events = harness.scheduler.commit(plan, harness.runner.run(plan))
    assert judged == DraftsJudged("a", "", drafts=4, right=2)
    assert [event.token for event in events] == [*tokens[1:4]]
    seq = harness.scheduler._seqs["a"]
    assert (seq.computed, seq.scheduled, seq.lease.sealed) == (6, 6, 1)
    assert [(row.start, row.count) for row in harness.scheduler.plan().rows] == [(6, 1)]


def test_a_loop_among_right_drafts_ends_the_sequence_there():
    for first in range(50):  # one of these prompts is followed by a token that comes twice
        req = request("a", (first, 2, 3), max_tokens=20, repetition=(1, 1, 2))
        tokens, reason, _ = answer(req, config())
        if reason is FinishReason.REPETITION and len(tokens) == 4:
            break
    harness = Harness(config(), FakeDrafter(1.0, count=6))
    harness.submit(req)
    assert harness.drain() == 2
    assert harness.finished["a"] == Finished("a", FinishReason.REPETITION)
    assert [len(row.drafts) for plan in harness.plans for row in plan.rows] == [0, 6]


def test_nothing_is_drafted_from_a_stop_token_on():
    third = answer(request("a", (1, 2, 3), max_tokens=20), config())[0][2]
    harness = Harness(config(), FakeDrafter(1.0, count=5))
    harness.submit(request("a", (1, 2, 3), max_tokens=20, token_ids=(third,), min_tokens=3))
    assert harness.drain() == 2
    assert harness.finished["a"] == Finished("a", FinishReason.STOP, stop_token=third)
    assert len(harness.tokens["a"]) == 3
    assert [len(row.drafts) for plan in harness.plans for row in plan.rows] == [0, 1]


def test_no_more_is_drafted_than_the_last_token_allows():
    harness = Harness(config(max_model_len=12), FakeDrafter(1.0, count=9))
    harness.submit(request("a", (1, 2, 3), max_tokens=6))
    harness.submit(request("b", (4, 5, 6), max_tokens=60))
    harness.step()
    plan = harness.plan()
    assert [len(row.drafts) for row in plan.rows] == [4, 7]
    harness.commit()
    assert not harness.live


def test_drafts_take_what_is_left_of_the_budget():
    harness = Harness(config(max_num_batched_tokens=8), FakeDrafter(1.0, count=5))
    harness.submit(request("a", (1, 2), max_tokens=30))
    harness.submit(request("b", (3, 4), max_tokens=30))
    harness.step()
    harness.submit(request("c", range(5), max_tokens=2))
    rows = harness.plan().rows
    assert [(row.count, len(row.drafts)) for row in rows] == [(2, 1), (1, 0), (5, 0)]
    harness.commit()
    harness.drain()


def test_drafts_take_no_block_that_somebody_may_need():
    """Two sequences grow and two blocks are left: drafts get none beyond the blocks that the sequences hold anyway."""
    harness = Harness(config(num_blocks=8, prefix_caching=False), FakeDrafter(0.0, count=5))
    harness.submit(request("a", range(10), max_tokens=14))
    harness.submit(request("b", range(20, 31), max_tokens=14))
    for _ in range(3):
        plan = harness.plan()
        assert all(len(row.new_blocks) <= 1 for row in plan.rows if row.drafts)
        harness.commit()
    assert harness.scheduler.stats.preemptions == 0
    harness.drain()


def test_what_decodes_and_what_is_known_is_draftable():
    harness = Harness(config(max_num_batched_tokens=6))
    harness.submit(request("long", range(9), max_tokens=5))
    assert list(harness.scheduler.draftable()) == []
    harness.step()
    assert list(harness.scheduler.draftable()) == [], "its prompt is not computed"
    harness.step()
    (one,) = harness.scheduler.draftable()
    assert (one.seq_id, list(one.tokens), one.most) == ("long", [*range(9), *harness.tokens["long"]], 3)
    harness.plan()
    assert list(harness.scheduler.draftable()) == [], "it is in flight"
    harness.commit()
    harness.drain()


def test_a_failure_behind_right_drafts_comes_after_what_they_brought():
    scheduler = Scheduler(config())
    scheduler.submit(request("a", (1, 2, 3), max_tokens=9))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult(0, (RowResult(0, (SampledToken(5),)),)))
    plan = scheduler.plan((Draft("a", (6, 7)),))
    events = scheduler.commit(plan, StepResult(1, (RowResult(0, (SampledToken(6),), failure="x"),)))
    judged = DraftsJudged("a", "", drafts=2, right=1)
    assert events == (judged, Generated("a", 6, 0.0), Finished("a", FinishReason.ERROR, message="x"))
    scheduler.check()


@pytest.mark.parametrize(
    ("tokens", "failure"),
    [((), ""), ((6,), ""), ((6, 7), ""), ((6, 7, 8, 9), ""), ((5, 7), ""), ((5,), "x"), ((6, 7, 8), "x")],
)
def test_a_result_that_cannot_come_of_the_drafts_is_refused_and_changes_nothing(tokens, failure):
    scheduler = Scheduler(config())
    scheduler.submit(request("a", (1, 2, 3), max_tokens=9))
    scheduler.commit(scheduler.plan(), StepResult(0, (RowResult(0, (SampledToken(5),)),)))
    plan = scheduler.plan((Draft("a", (6, 7)),))
    with pytest.raises(EngineFault, match="slot 0"):
        scheduler.commit(plan, StepResult(1, (RowResult(0, tuple(map(SampledToken, tokens)), failure=failure),)))
    judged, *events = scheduler.commit(plan, StepResult(1, (RowResult(0, (SampledToken(6), SampledToken(3))),)))
    assert judged == DraftsJudged("a", "", drafts=2, right=1)
    assert [event.token for event in events] == [6, 3]
    scheduler.check()


# ---- plans ahead


def ahead(**options) -> Harness:
    return Harness(config(depth=2, **options))


def test_the_next_row_is_planned_behind_a_token_that_is_not_known_yet():
    harness = ahead()
    harness.submit(request("a", (1, 2, 3), max_tokens=3))
    shapes = [(row.start, row.count) for _ in range(2) for row in harness.plan().rows]
    assert shapes == [(0, 3), (3, 1)]
    assert not harness.scheduler.can_plan_ahead
    with pytest.raises(EngineFault, match="plan 0"):
        harness.scheduler.plan()
    harness.commit()
    assert [(row.start, row.count) for row in harness.plan().rows] == [(4, 1)]
    harness.commit()
    assert not harness.scheduler.can_plan_ahead, "the third token is being drawn: there is no fourth"
    assert harness.drain() == 1


def test_plans_are_committed_in_their_order():
    harness = ahead()
    harness.submit(request("a", (1, 2, 3), max_tokens=5))
    harness.plan()
    second = harness.plan()
    with pytest.raises(EngineFault, match="eldest"):
        harness.scheduler.commit(second, StepResult(1, (RowResult(0, (SampledToken(1),)),)))
    harness.drain()


def test_a_row_computed_in_vain_changes_nothing_and_its_blocks_stay_until_it_is_done():
    second = answer(request("a", (1, 2, 3), max_tokens=9), config())[0][1]
    harness = ahead()
    harness.submit(request("a", (1, 2, 3), max_tokens=9, token_ids=(second,), min_tokens=2))
    harness.step()
    harness.plan()
    assert harness.commit() == (Generated("a", second, -1 / (1 + second)), Finished("a", FinishReason.STOP, second))
    stats = harness.scheduler.stats
    assert stats.free_blocks < stats.total_blocks, "the row behind the end is still being computed"
    assert harness.commit() == ()
    assert harness.scheduler.stats.free_blocks == stats.total_blocks
    harness.drain()


def test_an_abort_keeps_what_a_plan_in_flight_uses():
    harness = ahead(num_blocks=4)
    harness.submit(request("a", range(9), max_tokens=3))
    harness.plan()
    harness.abort("a")
    harness.submit(request("b", range(20, 29), max_tokens=3))
    assert harness.plan().admits == ()
    harness.commit()
    assert [admit.seq_id for admit in harness.plan().admits] == ["b"]
    harness.drain()


def test_the_eldest_gets_on_although_the_youngest_is_in_flight():
    harness = ahead(num_blocks=6)
    harness.submit(request("old", range(4), max_tokens=18))
    harness.submit(request("young", range(50, 54), max_tokens=18))
    harness.drain()
    assert harness.scheduler.stats.preemptions > 0
    assert list(harness.finished) == ["old", "young"]


def test_an_embedding_needs_no_row_behind_its_prompt():
    harness = ahead()
    harness.submit(embedding("a", range(5)))
    harness.plan()
    assert not harness.scheduler.can_plan_ahead
    assert [type(event) for event in harness.commit()] == [Admitted, Embedded, Finished]
    harness.drain()


def test_no_row_is_planned_behind_drafts_in_flight():
    harness = Harness(config(depth=2), FakeDrafter(1.0, count=2))
    harness.submit(request("a", (1, 2, 3), max_tokens=20))
    harness.plan()
    harness.commit()
    assert [len(row.drafts) for row in harness.plan().rows] == [2]
    assert not harness.scheduler.can_plan_ahead, "how far it gets is not known"
    assert len([event for event in harness.commit() if isinstance(event, Generated)]) == 3
    harness.drain()


# ---- what is not worth asking for


def asked(scheduler: Scheduler, tokens: list[int], right: bool) -> list[bool]:
    """Draw `tokens` one by one, guessing each for which a guess is asked for; returns whether one was, token by token.

    No step has time for a draft.
    """
    found = []
    for token in tokens:
        wanted = [one.seq_id for one in scheduler.draftable()]
        guess = token if right else (token + 1) % VOCAB
        plan = scheduler.plan(tuple(Draft(name, (guess,)) for name in wanted))
        assert all(not row.drafts for row in plan.rows)
        scheduler.commit(plan, StepResult(plan.step, (RowResult(0, (SampledToken(token),)),), seconds=plan.num_tokens))
        found.append(bool(wanted))
    return found


def test_guesses_that_are_wrong_are_sought_in_every_fourth_step_until_they_are_right():
    scheduler = Scheduler(config(max_model_len=128, num_blocks=64, step_target_ms=1, weigh_drafts=True))
    scheduler.submit(request("a", (1, 2, 3), max_tokens=100))
    plan = scheduler.plan()  # this row has no guess either
    scheduler.commit(plan, StepResult(0, (RowResult(0, (SampledToken(5),)),), seconds=3.0))
    assert asked(scheduler, [5] * 15, right=False) == [True] * 15
    assert asked(scheduler, [5] * 8, right=False) == [True, False, False, False] * 2
    assert asked(scheduler, [5] * 8, right=True) == [True] * 8
    assert asked(scheduler, [5] * 12, right=False) == [True] * 8 + [True, False, False, False]
