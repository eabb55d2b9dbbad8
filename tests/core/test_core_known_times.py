"""What is known of step times before the first step, and what is handed on to a later process."""

from __future__ import annotations

import math
import random

import pytest
from core_harness import config, request

from penstock.contract.errors import ConfigError
from penstock.contract.known_times import KnownParts, KnownTimes
from penstock.contract.plan import GuessWork, Row, StepPlan
from penstock.core.replaying import replay
from penstock.core.scheduler import Scheduler
from penstock.core.step_time import StepTimes, chunk_of
from penstock.core.trace import TraceReader, encode_header, encode_plan, encode_result, encode_submit
from penstock.sim import FakeRunner

STEP, ROW, SEEN, POSITION, PAIR = 0.012, 0.001, 2e-7, 0.0037, 8e-7


def plan(rows: int, start: int = 500, chunk: int = 0) -> StepPlan:
    decoding = [Row(slot, start, 1, (), True) for slot in range(rows)]
    return StepPlan(0, (), (), (*decoding, *((Row(rows, 0, chunk, (), False),) if chunk else ())))


def true_seconds(step: StepPlan) -> float:
    decoding = [row for row in step.rows if row.sample]
    chunks = [row for row in step.rows if not row.sample]
    own = STEP + sum(ROW + SEEN * row.start for row in decoding)
    return own + sum(POSITION * row.count + PAIR * row.count**2 / 2 for row in chunks)


def taught(known: KnownTimes | None = None, steps: int = 300, pace: float = 1.0, seed: int = 0) -> StepTimes:
    times, rng = StepTimes(known=known), random.Random(seed)
    for number in range(steps):
        step = plan(rng.randint(1, 16), rng.randint(10, 2000), rng.randint(16, 200) if number % 3 == 0 else 0)
        times.learn(step, pace * true_seconds(step) * rng.uniform(0.95, 1.05))
    return times


SHAPES = [plan(1), plan(16), plan(1, chunk=32), plan(4, chunk=200)]


def test_nothing_is_handed_on_before_a_step_was_measured():
    assert StepTimes().known is None
    assert Scheduler(config()).times.known is None


def test_a_later_process_foresees_its_first_step_as_the_earlier_one_would_have():
    earlier = taught()
    later = StepTimes(known=earlier.known.later())
    assert later.knows_chunks
    assert [later.of_plan(step) for step in SHAPES] == [earlier.of_plan(step) for step in SHAPES]


def test_a_machine_that_is_busier_than_it_was_is_followed_within_a_few_steps_of_any_kind():
    """Steps that only decode tell that chunks take longer too."""
    known = taught().known.later()
    times = StepTimes(known=known)
    for _ in range(6):
        times.learn(plan(2), 1.6 * true_seconds(plan(2)))
    for step in (plan(2), plan(2, chunk=64)):
        assert times.of_plan(step) == pytest.approx(1.6 * true_seconds(step), rel=0.15)


def test_a_part_that_is_wrong_is_corrected_although_it_was_sure():
    known = taught(steps=3000).known
    wrong = KnownParts(
        tuple(each * (3.0 if index == 4 else 1.0) for index, each in enumerate(known.steps.seconds)),
        known.steps.doubts,
        learned=known.steps.learned,
    )
    times = taught(KnownTimes(wrong.later(), chunks=True), steps=200, seed=1)
    for step in SHAPES:
        assert times.of_plan(step) == pytest.approx(true_seconds(step), rel=0.1)


def test_one_slow_first_step_does_not_overrule_an_earlier_process_but_does_overrule_a_calculation():
    known, step = taught().known.later(), plan(4)
    times = StepTimes(known=known)
    times.learn(step, 4 * true_seconds(step))
    assert times.of_plan(step) < 2.1 * true_seconds(step)
    calculated = KnownTimes(KnownParts(known.steps.seconds, tuple(0.75 * each for each in known.steps.seconds), 0.5))
    times = StepTimes(known=calculated)
    assert times.known is None  # a calculation is not handed on as if it had been measured
    assert not times.knows_chunks
    times.learn(step, 4 * true_seconds(step))
    assert times.of_plan(step) > 2.8 * true_seconds(step)


def test_all_that_was_learned_is_handed_on():
    times = taught()
    times.learn_guessing(GuessWork(0.004, 2, 10))
    times.learn_reading(32, 0.001)
    drafted = StepPlan(0, (), (), (Row(0, 500, 4, (), True, (1, 2, 3)),))
    for _ in range(20):
        times.learn(drafted, 0.03)
    later = StepTimes(known=times.known.later())
    assert later.guessing(1, 8) == times.guessing(1, 8) > 0
    assert later.reading(16) == times.reading(16) == pytest.approx(0.0005)
    assert later.draft_price([500]) == times.draft_price([500]) != (0.0, times.of(chunk_of(500, 1, None)))


@pytest.mark.parametrize("seconds", [(0.1, 0.1), (0.1,) * 7])
def test_another_number_of_parts_is_refused(seconds):
    with pytest.raises(ConfigError, match="parts"):
        StepTimes(known=KnownTimes(KnownParts(seconds, seconds)))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_numbers_that_no_time_can_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="step_times"):
        KnownParts((wrong,), (0.1,))
    with pytest.raises(ConfigError, match="step_times"):
        KnownParts((0.1,), (wrong,))
    with pytest.raises(ConfigError, match="doubts"):
        KnownParts((0.1,), ())


def test_a_trace_has_what_was_known_and_its_replay_makes_the_same_plans():
    """With a target, chunks depend on step times: without the known times, the replay would make other chunks."""
    known = taught().known.later()
    settings = {"num_blocks": 256, "max_num_batched_tokens": 512, "max_model_len": 600, "step_target_ms": 100}
    of = config(**settings, step_times=known)
    scheduler, runner, lines = Scheduler(of), FakeRunner(of), [encode_header(of)]
    for name, prompt in (("a", (1, 2)), ("b", tuple(range(400)))):
        scheduler.submit(request(name, prompt, max_tokens=40))
        lines.append(encode_submit(request(name, prompt, max_tokens=40)))
        for _ in range(3):
            made = scheduler.plan()
            result = runner.run(made)
            scheduler.commit(made, result)
            lines += [encode_plan(made), encode_result(result)]
    assert replay(lines).same
    assert TraceReader(lines).header().config.step_times == known
    without = [encode_header(config(**settings)), *lines[1:]]
    assert not replay(without).same
