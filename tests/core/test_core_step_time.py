"""How long steps are expected to take, from how long they took."""

from __future__ import annotations

import math
import random

import pytest

from penstock.contract.plan import Row, StepPlan
from penstock.core.step_time import StepTimes, chunk_of

STEP, ROW, SEEN, POSITION, PAIR = 0.012, 0.001, 2e-7, 0.0037, 8e-7
"""Seconds, as on an AVX2 machine with the default model."""


def decode(start: int, drafts: int = 0) -> Row:
    return Row(0, start, 1 + drafts, (), True, (0,) * drafts)


def part(start: int, count: int, *, last: bool = False) -> Row:
    return Row(0, start, count, (), last)


def plan(*rows: Row) -> StepPlan:
    return StepPlan(0, (), (), rows)


def true_seconds(step: StepPlan) -> float:
    decoding = [row for row in step.rows if row.count == 1]
    chunks = [row for row in step.rows if row.count > 1]
    pairs = sum(row.count * (row.start + row.count / 2) for row in chunks)
    positions = sum(row.count for row in chunks)
    seen = sum(row.start for row in decoding)
    return STEP + ROW * len(decoding) + SEEN * seen + POSITION * positions + PAIR * pairs


def expected(times: StepTimes, step: StepPlan) -> float:
    decoding = times.decoding([row.start for row in step.rows if row.count == 1])
    chunks = [chunk_of(row.start, row.count, times.window) for row in step.rows if row.count > 1]
    return times.of(decoding) + sum(times.of(chunk) for chunk in chunks)


def taught(noise: float = 0.0, steps: int = 400, seed: int = 0) -> StepTimes:
    """Times learned from steps of 1 to 8 streams, every third with a chunk."""
    times, rng = StepTimes(), random.Random(seed)
    for number in range(steps):
        rows = [decode(rng.randrange(100, 3000)) for _ in range(rng.randint(1, 8))]
        if number % 3 == 0:
            rows.append(part(rng.randrange(0, 5000), rng.randint(10, 100)))
        times.learn(plan(*rows), true_seconds(plan(*rows)) * rng.uniform(1 - noise, 1 + noise))
    return times


SHAPES = [
    plan(decode(500)),
    plan(*[decode(2000)] * 8),
    plan(decode(500), part(0, 32)),
    plan(*[decode(500)] * 4, part(5000, 16)),
    plan(decode(500), part(2500, 256)),
]


@pytest.mark.parametrize("step", SHAPES)
@pytest.mark.parametrize(("noise", "near"), [(0.0, 0.05), (0.2, 0.2)])
def test_every_shape_of_a_step_is_foreseen_after_some_hundred(step, noise, near):
    assert expected(taught(noise), step) == pytest.approx(true_seconds(step), rel=near)


def test_steps_that_all_have_a_chunk_teach_what_each_part_takes():
    """As under a load that never rests: the time of each part is learned all the same."""
    times, rng = StepTimes(), random.Random(0)
    for _ in range(400):
        rows = [decode(rng.randrange(60, 100)) for _ in range(rng.randint(10, 30))]
        rows.append(part(0, rng.randint(4, 40)))
        times.learn(plan(*rows), true_seconds(plan(*rows)) * rng.uniform(0.85, 1.15))
    for step in (plan(decode(80), part(0, 64)), plan(*[decode(80)] * 30)):
        assert expected(times, step) == pytest.approx(true_seconds(step), rel=0.15)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_prices_stay_sensible_however_long_one_shape_of_step_goes_on(shape):
    times, rng = taught(), random.Random(1)
    for _ in range(20_000):
        times.learn(shape, true_seconds(shape) * rng.uniform(0.7, 1.3))
    assert expected(times, shape) == pytest.approx(true_seconds(shape), rel=0.15)
    for step in SHAPES:
        assert expected(times, step) == pytest.approx(true_seconds(step), rel=0.5)


def test_the_first_step_gives_the_scale_and_a_slow_first_one_is_soon_forgotten():
    times, step = StepTimes(), plan(decode(100))
    times.learn(step, 1.0)
    assert expected(times, step) == pytest.approx(1.0)
    for _ in range(30):
        times.learn(step, 0.02)
    assert expected(times, step) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("seconds", [1e-6, 100.0])
def test_one_step_that_is_far_off_changes_little(seconds):
    times, step = taught(), SHAPES[2]
    before = expected(times, step)
    times.learn(step, seconds)
    assert before * 0.8 < expected(times, step) < before * 1.3


def test_a_machine_that_becomes_three_times_slower_is_followed_within_twenty_steps():
    times, step = taught(), SHAPES[3]
    for _ in range(20):
        times.learn(step, 3 * true_seconds(step))
    assert expected(times, step) == pytest.approx(3 * true_seconds(step), rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_teaches_nothing(seconds):
    times = taught()
    before = [expected(times, step) for step in SHAPES]
    for step in SHAPES:
        times.learn(step, seconds)
    assert [expected(times, step) for step in SHAPES] == before


def test_the_error_of_a_step_is_what_was_expected_before_it_was_learned():
    times, step = taught(), SHAPES[2]
    before = expected(times, step)
    assert times.of_plan(step) == pytest.approx(before)
    times.learn(step, 2 * before)
    assert times.error == pytest.approx(0.5)
    times.learn(plan(part(0, 256)), 0.1)  # draws nothing
    assert times.error is None


def test_nothing_is_expected_of_the_first_step_and_a_plan_is_expected_with_its_drafts():
    times = StepTimes()
    times.learn(plan(decode(100)), 0.01)
    assert times.error is None
    price = times.draft_price([100]).each
    assert times.of_plan(plan(decode(100, drafts=3))) == pytest.approx(times.of_plan(plan(decode(100))) + 3 * price)


def test_a_step_that_draws_nothing_teaches_nothing():
    times = StepTimes()
    times.learn(plan(part(0, 256)), 1e-6)
    assert not times.knows_chunks
    times.learn(plan(part(256, 20, last=True)), 0.1)
    assert times.knows_chunks


def test_a_draft_has_the_price_of_steps_with_about_as_many_rows():
    times = taught()
    of_prompt = times.of(chunk_of(100, 1, None))
    assert times.draft_price([100]) == (0.0, of_prompt) > (0.0, 0.0)  # nothing better is known
    alone = times.of(times.decoding([100]))
    for drafts in (2, 8, 32) * 20:
        times.learn(plan(decode(100, drafts=drafts)), alone + drafts * of_prompt / 4)
    assert times.draft_price([100]).each == pytest.approx(of_prompt / 4, rel=0.1)
    assert times.draft_price([100] * 8) == (0.0, times.of(chunk_of(100, 1, None)))


def test_having_drafts_and_each_of_them_are_told_apart():
    """As when one position more than there are rows begins another tile of every matrix product."""
    times, rows = taught(), [decode(100)] * 7
    alone, of_prompt = times.of(times.decoding([100] * 8)), times.of(chunk_of(100, 1, None))
    once, each = 2 * of_prompt, 0.7 * of_prompt
    for drafts in (1, 6, 2, 0, 16, 0, 1, 3) * 20:
        times.learn(plan(*rows, decode(100, drafts=drafts)), alone + (once + drafts * each if drafts else 0.0))
    price = times.draft_price([100] * 8)
    assert price.once == pytest.approx(once, rel=0.2)
    assert price.each == pytest.approx(each, rel=0.1)
    assert times.of_plan(plan(*rows, decode(100, drafts=1))) == pytest.approx(alone + once + each, rel=0.05)


def test_where_every_step_has_drafts_the_time_of_the_rest_is_learned_from_these():
    """The first steps of a process are slow; what they took must not be believed for good."""
    times = taught()
    alone, of_prompt = times.of(times.decoding([100])), times.of(chunk_of(100, 1, None))
    for _ in range(8):
        times.learn(plan(decode(100)), 2 * alone)
    assert times.of(times.decoding([100])) > 1.7 * alone
    for drafts in (2, 3, 8, 2, 16) * 12:
        times.learn(plan(decode(100, drafts=drafts)), alone + drafts * of_prompt / 2)
    assert times.of(times.decoding([100])) == pytest.approx(alone, rel=0.15)
    assert times.draft_price([100]).each == pytest.approx(of_prompt / 2, rel=0.15)


def test_a_price_at_which_nothing_is_drafted_is_forgotten():
    times = taught()
    alone = times.of(times.decoding([100]))
    for _ in range(10):
        times.learn(plan(decode(100, drafts=2)), 3 * alone)
    dear = times.draft_price([100]).of(1)
    for _ in range(150):
        times.learn(plan(decode(100)), alone)
    assert times.draft_price([100]).of(1) < 0.6 * dear
    assert times.draft_price([100]).of(1) == pytest.approx(times.of(chunk_of(100, 1, None)), rel=0.1)


def test_drafts_are_neither_dearer_than_two_positions_of_a_prompt_nor_free():
    for seconds, factor in ((1.0, 2), (1e-5, 1 / 8)):
        times = taught()
        for _ in range(30):
            times.learn(plan(decode(100, drafts=2)), seconds)
        of_prompt = times.of(chunk_of(100, 1, None))
        assert times.draft_price([100]).each == factor * of_prompt
        assert times.draft_price([100]).once <= 4 * of_prompt


def test_under_a_window_a_position_far_on_costs_what_one_at_its_end_does():
    assert chunk_of(5000, 10, 100) == chunk_of(200, 10, 100)
    times = StepTimes(window=100)
    assert times.decoding([5000, 50]).seen == 150


def test_nothing_is_ever_expected_to_take_less_than_no_time():
    times, rng = StepTimes(), random.Random(1)
    for _ in range(500):
        times.learn(plan(decode(rng.randrange(5000)), part(rng.randrange(5000), 8)), rng.expovariate(50))
        times.learn(plan(decode(rng.randrange(5000))), rng.expovariate(50))
        assert min(expected(times, step) for step in SHAPES) >= 0


def test_a_step_of_which_all_parts_are_expected_to_take_no_time_is_learned_like_a_first_one():
    """They came to 0 as the rest of steps whose chunks seemed to take all of the time, or more."""
    times = StepTimes()
    for number in range(40):
        count = 10 + 37 * number % 90
        times.learn(plan(decode(0), part(0, count)), 0.01 * count - 0.05)
    assert expected(times, plan(decode(0))) == pytest.approx(0.0, abs=1e-9)
    for _ in range(20):
        times.learn(plan(decode(0)), 0.002)
    assert expected(times, plan(decode(0))) == pytest.approx(0.002, rel=0.2)
