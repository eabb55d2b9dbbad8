"""What a row's result foresees: an input like any other, passed on to the drafter, and forgotten with the row."""

from __future__ import annotations

import pytest
from core_harness import config, request

from penstock.contract.errors import EngineFault
from penstock.contract.events import DraftsJudged
from penstock.contract.plan import Draft, RowResult, SampledToken, StepResult
from penstock.core.replaying import replay
from penstock.core.scheduler import Scheduler
from penstock.core.step_time import DraftPrice
from penstock.core.trace import encode_header, encode_plan, encode_result, encode_submit


def begun(**fields) -> Scheduler:
    scheduler = Scheduler(config(**fields))
    scheduler.submit(request("a", (1, 2, 3), max_tokens=20))
    return scheduler


def result(plan, *tokens: int, **fields) -> StepResult:
    return StepResult(plan.step, (RowResult(plan.rows[0].slot, tuple(map(SampledToken, tokens)), **fields),))


def foreseen(scheduler: Scheduler) -> list[tuple[int, ...]]:
    return [one.foreseen for one in scheduler.draftable()]


def test_what_the_last_row_foresees_is_known_until_the_next():
    scheduler = begun()
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, 5, foreseen=(6, 7)))
    assert foreseen(scheduler) == [(6, 7)]
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, 6))
    assert foreseen(scheduler) == [()]


def test_a_step_that_is_taken_back_and_a_row_that_waits_foresee_nothing():
    scheduler = begun()
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, 5, foreseen=(6, 7)))
    scheduler.plan()
    scheduler.drop_in_flight()
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, 6, foreseen=(8,)))
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, waits=True))
    assert foreseen(scheduler) == [()]


@pytest.mark.parametrize("fields", [{"waits": True}, {"failure": "x"}])
def test_a_row_that_draws_nothing_next_cannot_foresee(fields):
    scheduler = begun()
    plan = scheduler.plan()
    with pytest.raises(EngineFault, match="foresees"):
        scheduler.commit(plan, result(plan, foreseen=(6,), **fields))


@pytest.mark.parametrize(
    ("drawn", "judged"),
    [
        ((7, 8, 9, 4, 3), [("grammar", 2, 2), ("suffix", 2, 2)]),
        ((7, 8, 9, 3), [("grammar", 2, 2), ("suffix", 2, 1)]),
        ((7, 3), [("grammar", 2, 1), ("suffix", 2, 0)]),
        ((3,), [("grammar", 2, 0), ("suffix", 2, 0)]),
    ],
)
def test_guesses_that_stand_behind_each_other_are_judged_apart(drawn, judged):
    scheduler = begun()
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, 5))
    plan = scheduler.plan((Draft("a", (7, 8), "grammar"), Draft("a", (9, 4), "suffix", 2)))
    assert plan.rows[0].drafts == (7, 8, 9, 4)
    events = scheduler.commit(plan, result(plan, *drawn))
    told = [event for event in events if isinstance(event, DraftsJudged)]
    assert told == [DraftsJudged("a", *each) for each in judged]


def test_each_guess_has_a_chance_of_its_own(monkeypatch):
    scheduler = begun(weigh_drafts=True)
    seq = scheduler._seqs["a"]
    for _ in range(20):
        scheduler._drafting._chances.learn(seq.judgements, Draft("a", (1,), "grammar"), (1,))
        scheduler._drafting._chances.learn(seq.judgements, Draft("a", (1,), "suffix", 2), (2,))
    plan = scheduler.plan()
    scheduler.commit(plan, result(plan, 5))
    monkeypatch.setattr("penstock.core.step_time.StepTimes.of", lambda *_: 0.01)
    monkeypatch.setattr("penstock.core.step_time.StepTimes.draft_price", lambda *_: DraftPrice(0.0, 0.003))
    plan = scheduler.plan((Draft("a", (7, 8), "grammar"), Draft("a", (9, 4), "suffix", 2)))
    assert plan.rows[0].drafts == (7, 8)


def test_a_trace_has_what_was_foreseen_and_replays():
    scheduler = begun()
    lines = [encode_header(scheduler.config), encode_submit(request("a", (1, 2, 3), max_tokens=20))]
    for token in range(4):
        plan = scheduler.plan()
        came = result(plan, token, foreseen=(token + 1, 9))
        lines += [encode_plan(plan), encode_result(came)]
        scheduler.commit(plan, came)
    assert '"foreseen":[4,9]' in lines[-1]
    assert replay([line + "\n" for line in lines]).same
