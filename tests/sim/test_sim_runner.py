"""The fake runner answers as the golden model does, and refuses plans that break the rules."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.contract.plan import Admit, Row, RowResult, StepPlan, StepResult
from penstock.contract.ports import Clock, OverlappingRunner, Runner
from penstock.contract.sampling import SamplingSpec
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.sim import FakeRunner, PlanViolation, SimClock, StepCost, golden

CONFIG = SchedulerConfig(8, block_size=2, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=8)
VOCAB = 64


def admit(slot=0, tokens=(1, 2, 3), blocks=(4, 2), computed=0, **options) -> Admit:
    return Admit(slot, f"s{slot}", tokens, blocks, computed, SamplingSpec(), 0, **options)


def plan(step=0, releases=(), admits=(), rows=()) -> StepPlan:
    return StepPlan(step, tuple(releases), tuple(admits), tuple(rows))


def drawn(result: StepResult) -> tuple[int, ...]:
    """The tokens of all rows."""
    return tuple(token.id for row in result.rows for token in row.tokens)


FIRST = plan(admits=[admit()], rows=[Row(0, 0, 3, (), True)])


def started() -> FakeRunner:
    runner = FakeRunner(CONFIG, VOCAB)
    runner.run(FIRST)
    return runner


def test_it_answers_as_the_golden_model_through_scattered_blocks_and_chunks():
    runner = FakeRunner(CONFIG, VOCAB)
    assert runner.run(plan(admits=[admit()], rows=[Row(0, 0, 2, (), False)])).rows == ()
    got = drawn(runner.run(plan(1, rows=[Row(0, 2, 1, (), True)])))
    got += drawn(runner.run(plan(2, rows=[Row(0, 3, 1, (), True)])))
    got += drawn(runner.run(plan(3, rows=[Row(0, 4, 1, (7,), True)])))
    assert got == golden((1, 2, 3), 3, VOCAB, SamplingSpec())


def test_a_shared_sealed_block_is_read_not_written():
    runner = started()
    second = Admit(1, "b", (1, 2, 9), (4, 5), 2, SamplingSpec(), 0)
    result = runner.run(plan(1, admits=[second], rows=[Row(1, 2, 1, (), True)]))
    assert drawn(result) == golden((1, 2, 9), 1, VOCAB, SamplingSpec())


def test_a_wrong_block_changes_the_answer():
    runner = started()
    other = runner.run(plan(1, admits=[admit(1, (7, 8, 9), (0, 1))], rows=[Row(1, 0, 3, (), True)]))
    assert drawn(other) == golden((7, 8, 9), 1, VOCAB, SamplingSpec())
    wrong = Admit(2, "c", (1, 2, 9), (0, 5), 2, SamplingSpec(), 0)
    result = runner.run(plan(2, admits=[wrong], rows=[Row(2, 2, 1, (), True)]))
    assert drawn(result) != golden((1, 2, 9), 1, VOCAB, SamplingSpec())


@pytest.mark.parametrize(("one", "other"), [((5, 0), (6, 0)), ((5, 0), (5, 1))])
def test_seed_and_choice_change_the_answer(one, other):
    answers = [golden((1, 2), 8, VOCAB, SamplingSpec((("seed", seed),)), choice) for seed, choice in (one, other)]
    assert answers[0] != answers[1]


def test_golden_answers_are_prefixes_of_longer_ones():
    assert golden((1,), 9, VOCAB, SamplingSpec())[:4] == golden((1,), 4, VOCAB, SamplingSpec())


WRITTEN_TWICE = Admit(1, "b", (1, 2, 3, 9), (4, 2), 3, SamplingSpec(), 0)
NEVER_WRITTEN = Admit(1, "b", (1, 2, 3), (6, 7), 2, SamplingSpec(), 0)
HALF_WRITTEN = Admit(1, "b", (1, 2, 3, 3, 5), (4, 2, 6), 4, SamplingSpec(), 0)
UNLAWFUL = [
    (plan(2), "step 2 came where 1 was due"),
    (plan(1, releases=[2]), "slot 2 was released but is free"),
    (plan(1, admits=[admit(0, blocks=(0, 1))]), "slot 0 is taken"),
    (plan(1, admits=[admit(3, blocks=(0, 1))]), "slot 3 does not exist"),
    (plan(1, admits=[admit(1, (1, 2), (4,), 2)]), "nothing is left to compute"),
    (plan(1, admits=[admit(1, (1, 2, 3, 4), (4,), 3)]), "computed exceeds its blocks"),
    (plan(1, admits=[admit(1, blocks=(5, 5))]), "a block is listed twice"),
    (plan(1, admits=[admit(1, blocks=(0, 2))]), "new block 2 belongs to another slot"),
    (plan(1, admits=[admit(1, blocks=(0, 8))]), "block 8 does not exist"),
    (plan(1, rows=[Row(0, 3, 0, (), False)]), "a row computes nothing"),
    (plan(1, rows=[Row(0, 3, 1, (), False, (5,))]), "a row of nothing but drafts"),
    (plan(1, admits=[admit(1, blocks=(0, 1))], rows=[Row(1, 0, 2, (), False, (9,))]), "does not sample"),
    (plan(1, admits=[admit(1, blocks=(0, 1))], rows=[Row(1, 0, 5, (), True, (9, 9))]), "too few blocks"),
    (plan(1, rows=[Row(1, 0, 1, (), True)]), "slot 1 has a row but no sequence"),
    (plan(1, rows=[Row(0, 4, 1, (), True)]), "starts at 4, but 3 are computed"),
    (plan(1, rows=[Row(0, 2, 1, (), True)]), "starts at 2, but 3 are computed"),
    (plan(1, rows=[Row(0, 3, 2, (5,), True)]), "beyond its known tokens"),
    (plan(1, rows=[Row(0, 3, 1, (), False)]), "samples exactly when"),
    (plan(1, admits=[admit(1, blocks=(0, 1))], rows=[Row(1, 0, 2, (), True)]), "samples exactly when"),
    (plan(1, rows=[Row(0, 3, 1, (), True), Row(0, 3, 1, (), True)]), "a slot has two rows"),
    (plan(1, admits=[admit(1, blocks=(0,))], rows=[Row(1, 0, 3, (), True)]), "too few blocks"),
    (plan(1, rows=[Row(0, 3, 1, (2,), True)]), "new block 2 belongs to another slot"),
    (plan(1, admits=[admit(1, (1,) * 7, (0, 1, 3, 5))], rows=[Row(1, 0, 7, (), True)]), "budget is exceeded"),
    (plan(1, admits=[WRITTEN_TWICE], rows=[Row(1, 3, 1, (), True)]), "writes block 2, which others hold too"),
    (plan(1, admits=[NEVER_WRITTEN], rows=[Row(1, 2, 1, (), True)]), "never written"),
    (plan(1, admits=[HALF_WRITTEN], rows=[Row(1, 4, 1, (), True)]), "never written"),
]


@pytest.mark.parametrize(("unlawful", "law"), UNLAWFUL, ids=[law for _, law in UNLAWFUL])
def test_an_unlawful_plan_is_refused(unlawful, law):
    with pytest.raises(PlanViolation, match=law):
        started().run(unlawful)


def test_a_row_beyond_the_context_is_refused():
    runner = FakeRunner(dataclasses.replace(CONFIG, max_num_batched_tokens=99), VOCAB)
    with pytest.raises(PlanViolation, match="context"):
        runner.run(plan(admits=[admit(0, (1,) * 9, (0, 1, 2, 3, 4))], rows=[Row(0, 0, 9, (), True)]))


def test_two_rows_never_write_one_block():
    runner = FakeRunner(CONFIG, VOCAB)
    rows = [Row(0, 0, 1, (), True), Row(1, 0, 1, (), True)]
    with pytest.raises(PlanViolation):
        runner.run(plan(admits=[admit(0, (1,), (3,)), admit(1, (2,), (3,))], rows=rows))


def test_a_block_that_is_being_written_may_not_be_shared():
    early = Admit(1, "b", (1, 2, 9), (4, 5), 2, SamplingSpec(), 0)
    rows = [Row(0, 0, 3, (), True), Row(1, 2, 1, (), True)]
    with pytest.raises(PlanViolation, match="writes block 4, which others hold too"):
        FakeRunner(CONFIG, VOCAB).run(plan(admits=[admit(), early], rows=rows))


def test_a_block_that_is_handed_out_again_holds_nothing():
    runner = started()
    runner.run(plan(1, releases=[0], admits=[admit(1, (7,), (4,))], rows=[]))
    stale = Admit(2, "c", (1, 2, 3), (4, 5), 2, SamplingSpec(), 0)
    with pytest.raises(PlanViolation, match="never written"):
        runner.run(plan(2, admits=[stale], rows=[Row(2, 2, 1, (), True)]))


def test_a_released_slot_is_forgotten_and_free():
    runner = started()
    assert runner.occupied == {0: "s0"}
    runner.run(plan(1, releases=[0]))
    assert runner.occupied == {}


@pytest.mark.parametrize(("wrong", "came"), [(0, 1), (1, 2), (2, 3), (9, 4)])
def test_a_row_brings_the_drafts_that_were_right_and_one_token_more(wrong, came):
    """Draft number `wrong` is wrong; whatever it has left in memory, the answer is the golden one."""
    runner, tokens = started(), golden((1, 2, 3), 6, VOCAB, SamplingSpec())
    drafts = tuple((t + 1) % VOCAB if at == wrong else t for at, t in enumerate(tokens[1:4]))
    assert drawn(runner.run(plan(1, rows=[Row(0, 3, 4, (7, 6), True, drafts)]))) == tokens[1 : 1 + came]
    assert drawn(runner.run(plan(2, rows=[Row(0, 3 + came, 1, (), True)]))) == (tokens[1 + came],)


AHEAD = dataclasses.replace(CONFIG, depth=2)


def test_a_started_plan_is_computed_when_its_result_is_asked_for_in_order():
    runner = FakeRunner(AHEAD, VOCAB)
    runner.start(FIRST)
    runner.start(plan(1, rows=[Row(0, 3, 1, (), True)]))
    tokens = golden((1, 2, 3), 2, VOCAB, SamplingSpec())
    assert [drawn(runner.finish()), drawn(runner.finish())] == [tokens[:1], tokens[1:]]


def test_a_sequence_that_failed_fails_again_in_the_plan_behind():
    runner = FakeRunner(AHEAD, VOCAB)
    runner.fail_sequence("s0", "not finite")
    runner.start(FIRST)
    runner.start(plan(1, rows=[Row(0, 3, 1, (), True)]))
    assert [runner.finish().rows, runner.finish().rows] == [(RowResult(0, failure="not finite"),)] * 2


@pytest.mark.parametrize(
    ("unlawful", "law"),
    [
        (plan(1, releases=[0]), "slot 0 was released while a plan in flight computes its row"),
        (plan(1, releases=[0], admits=[admit(1, blocks=(0, 4))]), "slot 0 was released while"),
        (plan(1, rows=[Row(0, 3, 2, (5,), True)]), "beyond its known tokens"),
        (plan(1, rows=[Row(0, 4, 1, (5,), True)]), "starts at 4, but 3 are computed"),
        (plan(1, rows=[Row(0, 3, 1, (), False)]), "samples exactly when"),
    ],
)
def test_what_a_plan_in_flight_uses_is_not_given_away_and_what_it_computes_is_continued(unlawful, law):
    with pytest.raises(PlanViolation, match=law):
        both_started(FIRST, unlawful)


def both_started(first: StepPlan, second: StepPlan) -> None:
    runner = FakeRunner(AHEAD, VOCAB)
    runner.start(first)
    runner.start(second)
    runner.finish()
    runner.finish()


def test_no_more_plans_are_in_flight_than_it_takes():
    runner = FakeRunner(CONFIG, VOCAB)
    runner.start(FIRST)
    with pytest.raises(PlanViolation, match="more than 1"):
        runner.start(plan(1))


def test_an_ordered_failure_takes_one_row_alone():
    runner = started()
    runner.fail_sequence("s0", "not finite")
    both = plan(1, admits=[admit(1, (9,), (0,))], rows=[Row(0, 3, 1, (), True), Row(1, 0, 1, (), True)])
    result = runner.run(both)
    failed, other = result.rows
    assert failed == RowResult(0, failure="not finite")
    assert (other.slot, drawn(result)) == (1, golden((9,), 1, VOCAB, SamplingSpec()))


def test_an_ordered_crash_takes_the_whole_step():
    runner = FakeRunner(CONFIG, VOCAB)
    runner.crash_at(0)
    with pytest.raises(RuntimeError, match="told to crash"):
        runner.run(FIRST)


def test_a_step_costs_what_the_model_says():
    clock = SimClock()
    runner = FakeRunner(CONFIG, VOCAB, StepCost(step=1.0, token=0.5, context=0.25), clock)
    assert runner.run(FIRST).seconds == 1.0 + 3 * 0.5 + 3 * 0.25
    assert runner.run(plan(1, rows=[Row(0, 3, 1, (), True)])).seconds == 1.0 + 0.5 + 4 * 0.25
    assert clock.now() == 3.25 + 2.5


def test_simulated_time_stands_still_until_it_is_moved_and_never_runs_back():
    clock = SimClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(0.5)
    assert clock.now() == 5.5
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="negative"):
            clock.advance(bad)


def test_they_fit_the_ports():
    runner: Runner = FakeRunner(CONFIG)
    assert isinstance(runner, OverlappingRunner)
    clock: Clock = SimClock()
    assert runner.run(plan()).rows == ()
    assert clock.now() == 0.0
