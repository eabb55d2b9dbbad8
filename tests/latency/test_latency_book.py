"""Steps made by hand, and the parts in which their seconds are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.contract.measurements import NEXT_STEP, NO_PARTS, PARTS, TURN, UNTIMED, LatencyParts, Timings
from penstock.contract.plan import Admit, GuessWork, Row, RowResult, StepPlan, StepResult
from penstock.contract.request import SequenceRequest
from penstock.contract.sampling import NEUTRAL
from penstock.core.step_time import StepTimes
from penstock.latency import LatencyBook
from penstock.latency.division import divide


def admit(slot: int, seq_id: str, tokens: int, computed: int = 0) -> Admit:
    return Admit(slot, seq_id, (1,) * tokens, (), computed, NEUTRAL, 0)


def chunk(slot: int, start: int, count: int, *, sample: bool = False) -> Row:
    return Row(slot, start, count, (), sample)


def decode(slot: int, start: int) -> Row:
    return Row(slot, start, 1, (), True)


class Run:
    """A book whose steps take a second each, one right after the other."""

    def __init__(self, times: StepTimes | None = None) -> None:
        self.book = LatencyBook(times or StepTimes())
        self.now = 0.0
        self._step = 0

    def submit(self, seq_id: str) -> None:
        self.book.submitted(SequenceRequest(seq_id, (1,), arrival=self.now), self.now)

    def step(self, *rows: Row, admits: tuple[Admit, ...] = (), releases: tuple[int, ...] = (), **result) -> None:
        plan = StepPlan(self._step, releases, admits, rows)
        self.book.planned(plan, self.now)
        self.now += 1.0
        self.book.ran(StepResult(self._step, **{"seconds": 1.0, **result}), self.now)
        self._step += 1

    def parts(self, seq_id: str) -> dict[str, float]:
        """The parts that are not 0."""
        parts = self.book.ended(seq_id, self.now)
        return {name: getattr(parts, name) for name in PARTS if abs(getattr(parts, name)) > 1e-12}


def test_while_nothing_is_known_a_step_is_divided_by_positions():
    run = Run()
    for seq_id in ("a", "b", "c"):
        run.submit(seq_id)
    run.step(chunk(0, 0, 8, sample=True), admits=(admit(0, "a", 8),))
    run.step(decode(0, 8), chunk(1, 0, 6), chunk(2, 0, 3), admits=(admit(1, "b", 9), admit(2, "c", 3)))
    assert run.parts("a") == pytest.approx({"prompt": 1.0, "decode": 0.1, "other_prompts": 0.9})
    assert run.parts("b") == pytest.approx({"queue": 1.0, "prompt": 0.6, "other_prompts": 0.3, "other_decodes": 0.1})
    assert run.parts("c") == pytest.approx({"queue": 1.0, "prompt": 0.3, "other_prompts": 0.6, "other_decodes": 0.1})


def test_what_is_known_of_steps_divides_them():
    times = StepTimes()
    plan = StepPlan(0, (), (), (decode(0, 100),))
    for _ in range(40):
        times.learn(plan, 0.010)
        times.learn(replace(plan, rows=(decode(0, 100), chunk(1, 0, 50))), 0.040)
    shares = divide(replace(plan, rows=(decode(0, 100), chunk(1, 0, 50))), StepResult(0, seconds=0.080), 0.100, times)
    assert shares.decode == pytest.approx(0.020, rel=0.1)
    assert shares.prompts == pytest.approx(0.060, rel=0.1)
    assert shares.of_rows == {1: pytest.approx(shares.prompts)}
    assert shares.engine == pytest.approx(0.020)
    assert shares.total == pytest.approx(0.100)


def test_one_that_runs_without_a_row_has_lost_the_step_to_the_others():
    run = Run()
    run.submit("a")
    run.submit("b")
    run.step(chunk(0, 0, 5, sample=True), chunk(1, 0, 5, sample=True), admits=(admit(0, "a", 5), admit(1, "b", 5)))
    run.step(decode(0, 5))
    run.step(decode(0, 6), decode(1, 5))
    assert run.parts("a") == pytest.approx({"prompt": 0.5, "other_prompts": 0.5, "decode": 2.0})
    assert run.parts("b") == pytest.approx({"prompt": 0.5, "other_prompts": 0.5, "left_out": 1.0, "decode": 1.0})


def test_one_that_ends_in_a_step_hides_nobody_who_had_no_row_in_it():
    run = Run()
    run.submit("a")
    run.submit("b")
    run.step(chunk(0, 0, 5, sample=True), chunk(1, 0, 5, sample=True), admits=(admit(0, "a", 5), admit(1, "b", 5)))
    plan = StepPlan(1, (), (), (decode(0, 5),))
    run.book.planned(plan, run.now)
    assert run.parts("a")["prompt"] == 0.5
    run.now += 1.0
    run.book.ran(StepResult(1, seconds=1.0), run.now)
    assert run.parts("b")["left_out"] == 1.0


def test_reading_blocks_is_restored_for_their_owner_and_a_prompt_for_all_others():
    run = Run()
    run.submit("a")
    run.submit("b")
    run.step(chunk(0, 0, 5, sample=True), admits=(admit(0, "a", 5),))
    reading = Row(1, 0, 4, (), False, stored=(b"key",))
    run.step(decode(0, 5), reading, admits=(admit(1, "b", 9),), restoring=0.25)
    assert run.parts("a") == pytest.approx({"prompt": 1.0, "other_prompts": 0.25, "decode": 0.75})
    assert run.parts("b") == pytest.approx({"queue": 1.0, "restored": 0.25, "other_decodes": 0.75})


def test_a_draft_model_and_what_the_runner_was_not_busy_with_are_apart():
    run = Run()
    run.submit("a")
    run.step(chunk(0, 0, 5, sample=True), admits=(admit(0, "a", 5),))
    run.step(decode(0, 5), seconds=0.8, guessing=GuessWork(0.3, 1, 1))
    assert run.parts("a") == pytest.approx({"prompt": 1.0, "decode": 0.5, "drafting": 0.3, "engine": 0.2})


def test_the_last_position_of_a_cached_prompt_is_its_row_of_those_that_decode():
    run = Run()
    run.submit("a")
    run.submit("b")
    run.step(chunk(0, 0, 5, sample=True), admits=(admit(0, "a", 5),))
    run.step(decode(0, 5), decode(1, 4), admits=(admit(1, "b", 5, computed=4),))
    assert run.parts("b") == pytest.approx({"queue": 1.0, "prompt": 0.5, "other_decodes": 0.5})


def test_steps_in_flight_together_follow_one_another():
    book, rows = LatencyBook(StepTimes()), (chunk(0, 0, 5, sample=True),)
    book.submitted(SequenceRequest("a", (1,), arrival=0.0), 1.0)
    book.planned(StepPlan(0, (), (admit(0, "a", 5),), rows), 2.0)
    book.planned(StepPlan(1, (), (), (decode(0, 5),)), 2.5)
    book.ran(StepResult(0, seconds=2.0), 4.0)
    book.ran(StepResult(1, (RowResult(0),), seconds=0.75), 5.0)
    parts = book.ended("a", 5.0)
    assert (parts.queue, parts.queue_for) == (2.0, ((NEXT_STEP, 2.0),))
    assert (parts.prompt, parts.decode, parts.engine) == (2.0, 0.75, 0.25)


def test_nobody_knows_one_that_was_not_submitted():
    assert LatencyBook(StepTimes()).ended("a", 1.0) == NO_PARTS
    assert LatencyBook(StepTimes()).so_far("a") == NO_PARTS


def test_of_several_prompts_the_last_one_counts_with_its_wait_for_its_turn():
    first = Timings(arrived=1.0, ended=4.0, parts=LatencyParts(decode=3.0))
    second = Timings(arrived=2.0, ended=6.0, parts=LatencyParts(queue=1.0, queue_for=((NEXT_STEP, 1.0),), decode=3.0))
    for joined in (first.joined(second), second.joined(first)):
        assert joined.parts == LatencyParts(queue=2.0, queue_for=((NEXT_STEP, 1.0), (TURN, 1.0)), decode=3.0)
        assert joined.parts.total == joined.total
    assert first.joined(replace(second, parts=NO_PARTS)).parts == NO_PARTS


def test_what_the_server_adds_makes_it_the_whole():
    parts = LatencyParts(decode=3.0)
    whole = parts.within(began=9.5, arrived=10.0, now=15.0)
    assert (whole.intake, whole.reader, whole.total) == (0.5, 2.0, 5.5)
    elsewhere = parts.within(began=9.5, arrived=2.0, now=15.0)  # by another clock
    assert (elsewhere.intake, elsewhere.reader, elsewhere.total) == (2.5, 0.0, 5.5)
    assert Timings(arrived=10.0, parts=parts).delivered(14.0).parts == LatencyParts(decode=3.0, text=1.0)
    assert UNTIMED.delivered(14.0) == UNTIMED
