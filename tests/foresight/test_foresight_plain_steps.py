"""Plain steps are passed over at once, with the same result as planning each of them."""

from __future__ import annotations

import dataclasses
import random

import pytest
from core_harness import config, request

from penstock.contract.errors import EngineFault
from penstock.contract.known_times import KnownParts, KnownTimes
from penstock.contract.plan import RowResult, SampledToken, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.core.step_time import StepTimes
from penstock.foresight.arrivals import Arrival
from penstock.foresight.engine import SimulatedEngine, run
from penstock.foresight.step_costs import Measurements, Rest, StepCosts

PARTS = (0.02, 0.002, 0.003, 1e-6, 0.001, 1e-7)
KNOWN = KnownTimes(KnownParts(PARTS, tuple(0.01 * each for each in PARTS), learned=1000), chunks=True)
SURE = StepCosts(StepTimes(None, KNOWN), Measurements(()), Measurements(()), wake=0.001)
CONFIG = SchedulerConfig(
    120, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=512, step_target_ms=60, step_times=KNOWN
)


def arrivals(seed: int, rate: float, count: int = 80) -> list[Arrival]:
    """Requests that share prefixes; some repeat an earlier answer, and the callers of some leave."""
    rng, at, made = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        shared = range(1000 * rng.randrange(4), 1000 * rng.randrange(1, 5))[: rng.randrange(0, 100)]
        prompt = (*shared, *(rng.randrange(1 << 30) for _ in range(rng.randrange(1, 80))))
        answer = tuple(rng.randrange(1 << 30) for _ in range(rng.randrange(1, 120)))
        if made and rng.random() < 0.3:
            earlier = rng.choice(made)
            prompt = (*earlier.request.prompt, *earlier.answer, *prompt)[:380]
        asked = request(f"{number}/0", prompt, len(answer), arrival=at, tenant="ab"[number % 2])
        patience = 2.0 if rng.random() < 0.2 else float("inf")
        made.append(Arrival(at, asked, answer if rng.random() < 0.7 else (), patience))
    return made


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("rate", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_day_is_the_same_whether_every_step_is_planned_or_not(seed, rate, policy):
    day = arrivals(seed, rate)
    whole, quick = (
        SimulatedEngine(dataclasses.replace(CONFIG, policy=policy), SURE, every=every) for every in (True, False)
    )
    facts, found = run(whole, day), run(quick, day)
    assert quick.planned < whole.planned == whole.steps == quick.steps
    assert [each.id for each in found] == [each.id for each in facts]
    assert quick.left == whole.left
    for one, other in zip(found, facts, strict=True):
        assert (one.cached_tokens, one.tokens) == (other.cached_tokens, other.tokens)
        assert one.times.tolist() == pytest.approx(other.times.tolist(), abs=1e-6)
    one, other = quick.scheduler.stats, whole.scheduler.stats
    assert one == other
    assert quick.scheduler._pool._index == whole.scheduler._pool._index  # the same blocks hold the same contents
    quick.scheduler.check()


def test_an_engine_that_was_looked_at_now_and_then_did_the_same():
    day = arrivals(5, 1.0)
    alone, watched = SimulatedEngine(CONFIG, SURE), SimulatedEngine(CONFIG, SURE)
    facts = run(alone, day)
    now = 0.0
    for each in day:
        while now < each.at:
            watched.run(now)
            now += 0.37
        watched.run(each.at)
        watched.offer(each)
    watched.run()
    assert [(each.id, each.ended) for each in watched.served] == [(each.id, each.ended) for each in facts]


def test_most_steps_of_a_quiet_day_are_not_planned():
    engine = SimulatedEngine(CONFIG, SURE)
    run(engine, arrivals(1, 0.05))
    assert engine.planned < engine.steps / 8


def test_what_scatters_still_scatters_as_it_was_measured():
    scatter = Measurements([((1, 0), 0.8 + each / 100) for each in range(40)])
    costs = StepCosts(StepTimes(None, KNOWN), scatter, Measurements([((1, 0), Rest(0.001, 0.002))] * 12))
    day = [Arrival(0.0, request("0/0", range(20), 200))]
    (whole,) = run(SimulatedEngine(CONFIG, costs, every=True), day)
    (quick,) = run(SimulatedEngine(CONFIG, costs), day)
    assert len(set(quick.gaps)) > 50
    assert quick.end_to_end == pytest.approx(whole.end_to_end, rel=0.02)


def drawing(scheduler: Scheduler, steps: int) -> None:
    """Plan and commit steps in which every row that can draws token 7."""
    for _ in range(steps):
        plan = scheduler.plan()
        rows = tuple(RowResult(row.slot, (SampledToken(7),)) for row in plan.rows if row.sample)
        scheduler.commit(plan, StepResult(plan.step, rows, 0.01))


def test_plain_steps_end_before_a_sequence_or_the_blocks_do():
    scheduler = Scheduler(config())
    assert scheduler.plain_steps().steps == 0
    scheduler.submit(request("a", range(3), 10))
    scheduler.submit(request("b", range(10, 13), 20))
    assert scheduler.plain_steps().steps == 0  # both still wait
    drawing(scheduler, 1)
    assert scheduler.plain_steps() == (8, ("a", "b"))  # a ends with its tenth token
    scarce = Scheduler(config(num_blocks=3))
    scarce.submit(request("a", range(4), 5))
    drawing(scarce, 1)
    assert scarce.plain_steps().steps == 3
    tight = Scheduler(config(num_blocks=4))
    for name in "ab":
        tight.submit(request(name, range(ord(name), ord(name) + 3), 9))
        drawing(tight, 1)
    assert tight.num_running == 2
    assert tight.plain_steps().steps == 3  # seven would need four blocks, and two are left


@pytest.mark.parametrize("options", [{"token_ids": (5,)}, {"repetition": (2, 4, 3)}])
def test_steps_that_may_end_a_sequence_in_other_ways_are_planned(options):
    scheduler = Scheduler(config())
    scheduler.submit(request("a", range(3), 10, **options))
    drawing(scheduler, 1)
    assert scheduler.plain_steps().steps == 0


@pytest.mark.parametrize("options", [{"window": 8}, {"checkpoints": 4}])
def test_models_that_keep_something_else_than_blocks_have_no_plain_steps(options):
    scheduler = Scheduler(config(**options))
    scheduler.submit(request("a", range(3), 10))
    drawing(scheduler, 1)
    assert scheduler.plain_steps().steps == 0


def test_more_steps_than_are_plain_or_other_tokens_are_a_fault():
    scheduler = Scheduler(config())
    scheduler.submit(request("a", range(3), 10))
    drawing(scheduler, 1)
    with pytest.raises(EngineFault):
        scheduler.pass_plain_steps(9, {"a": [7] * 9})
    with pytest.raises(EngineFault):
        scheduler.pass_plain_steps(2, {"a": [7]})
    scheduler.pass_plain_steps(8, {"a": [7] * 8})
    scheduler.check()
