"""Steps keep to their target while sequences decode; prompts advance at any target, and take hardly longer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from core_harness import Harness, answer, config, embedding, request, run_workload

from penstock.contract.errors import ConfigError
from penstock.contract.plan import Admit, Draft, Row, RowResult, SampledToken, StepPlan, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import chunk_limit
from penstock.core.chunk_limit import LEAST
from penstock.core.scheduler import Scheduler

PROMPT = 5400
Cost = Callable[[StepPlan], float]


def cost(step: float, row: float, seen: float, position: float, pair: float, noise: float = 0.0) -> Cost:
    """Seconds of a plan, linear in what it computes, times something in `1 - noise .. 1 + noise`."""
    rng = random.Random(0)

    def seconds(plan: StepPlan) -> float:
        decoding = [each for each in plan.rows if each.sample and each.count == 1]
        chunks = [each for each in plan.rows if each.count > 1]
        pairs = sum(each.count * (each.start + each.count / 2) for each in chunks)
        total = step + row * len(decoding) + seen * sum(each.start for each in decoding)
        total += position * sum(each.count for each in chunks) + pair * pairs
        return total * rng.uniform(1 - noise, 1 + noise)

    return seconds


SLOW = (0.012, 0.001, 2e-7, 0.0019, 3e-7)
"""Near what two cores with AVX2 need for the default model."""
QUICK = (0.008, 0.0003, 5e-8, 0.0004, 6e-8)
BARE = (0.010, 0.0002, 1e-9, 0.00003, 1e-9)
"""A device to which a position is next to nothing beside the step."""
LARGE = (0.300, 0.002, 1e-6, 0.030, 2e-6)
"""A model so large that decoding alone is beyond the target."""


class Timed:
    """A scheduler with the times of steps in place of a runner. Every token is 1."""

    def __init__(self, seconds: Cost, *, target: int, num_blocks: int = 2048, **options) -> None:
        defaults = {"block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 8192}
        self.scheduler = Scheduler(SchedulerConfig(num_blocks, step_target_ms=target, **{**defaults, **options}))
        self.seconds = seconds
        self.time = 0.0
        self.plans: list[StepPlan] = []
        self.took: list[float] = []
        self.admits: dict[int, Admit] = {}

    def step(self, drafts: Iterable[Draft] = ()) -> StepPlan:
        plan = self.scheduler.plan(tuple(drafts))
        self.admits |= {admit.slot: admit for admit in plan.admits}
        results = [self.result(row) for row in plan.rows]
        seconds = self.seconds(plan)
        self.scheduler.commit(plan, StepResult(plan.step, tuple(each for each in results if each), seconds))
        self.time += seconds
        self.plans.append(plan)
        self.took.append(seconds)
        return plan

    def result(self, row: Row) -> RowResult | None:
        """The result of a row, if it has one; every draft is right."""
        if row.sample:
            return RowResult(row.slot, (SampledToken(1),) * (1 + len(row.drafts)))
        whole = row.start + row.count == len(self.admits[row.slot].tokens)
        return RowResult(row.slot, embedding=bytes(4)) if whole else None

    def stream(self, count: int, steps: int = 40) -> None:
        """Begin `count` answers, which run alone for this many steps."""
        for number in range(count):
            self.scheduler.submit(request(f"stream {number}", [number] * 20, max_tokens=8000))
        for _ in range(steps):
            self.step()

    def read(self, prompts: int = 1, length: int = PROMPT) -> float:
        """Seconds until this many prompts have a token; forgets earlier steps."""
        began = self.time
        self.plans, self.took = [], []
        for number in range(prompts):
            self.scheduler.submit(request(f"{began} {number}", [number] * length, max_tokens=2, cache_salt=str(began)))
        while self.chunks(self.step()) or self.scheduler.num_waiting:
            pass
        return self.time - began

    def chunks(self, plan: StepPlan) -> list[int]:
        return [row.count for row in plan.rows if row.count > 1]


def gaps(timed: Timed) -> list[float]:
    return sorted(seconds for seconds, plan in zip(timed.took, timed.plans, strict=True) if timed.chunks(plan))


@pytest.mark.parametrize(
    ("parts", "target"), [(SLOW, 100), (SLOW, 200), (QUICK, 50), (QUICK, 100), (QUICK, 200), (BARE, 100)]
)
def test_steps_keep_to_the_target_while_somebody_decodes(parts, target):
    timed = Timed(cost(*parts, noise=0.1), target=target)
    timed.stream(4)
    timed.read()
    timed.read(prompts=3)
    took = gaps(timed)
    assert took[-1] < 1.5 * target / 1000
    assert took[int(len(took) * 0.99)] < 1.25 * target / 1000


@pytest.mark.parametrize("parts", [SLOW, QUICK])
def test_the_time_is_used(parts):
    timed = Timed(cost(*parts), target=100)
    timed.stream(4)
    timed.read(prompts=3)
    took = gaps(timed)
    assert took[len(took) // 2] > 0.085


@pytest.mark.parametrize("parts", [SLOW, QUICK, BARE])
def test_prompts_take_hardly_longer(parts):
    bounded, free = (Timed(cost(*parts), target=target) for target in (150, 0))
    for each in (bounded, free):
        each.stream(4)
        each.read()
    assert bounded.read(prompts=3) < 1.1 * free.read(prompts=3)


def test_without_a_target_and_where_nobody_decodes_chunks_are_as_large_as_they_may_be():
    free, alone = Timed(cost(*SLOW), target=0), Timed(cost(*SLOW), target=20)
    free.stream(4)
    free.read(length=1024)
    assert free.chunks(free.plans[0]) == [252]
    alone.read(length=1024)
    assert [alone.chunks(plan) for plan in alone.plans[:4]] == [[256]] * 4


@pytest.mark.parametrize("target", [1, 20, 100])
def test_prompts_always_get_on(target):
    timed = Timed(cost(*LARGE, noise=0.3), target=target)
    timed.stream(8)
    timed.read(prompts=3, length=400)
    assert all(sum(timed.chunks(plan)) >= LEAST for plan in timed.plans if sum(timed.chunks(plan)) > 1)
    assert sum(plan.num_tokens for plan in timed.plans) > 3 * 400
    assert len([plan for plan in timed.plans if timed.chunks(plan)]) <= 3 * 400 / LEAST + 3


def test_where_decoding_alone_takes_the_target_prompts_get_half_as_much():
    timed = Timed(cost(0.05, 0.01, 0, 0.001, 0), target=100)
    timed.stream(5)
    timed.read(length=800)
    assert timed.chunks(timed.plans[8])[0] == pytest.approx(50, abs=5)


def test_a_first_step_ten_times_as_slow_is_forgotten():
    slow_once = iter([1.0])
    usual = cost(*SLOW)
    timed = Timed(lambda plan: next(slow_once, None) or usual(plan), target=100)
    timed.stream(4)
    timed.read()
    took = gaps(timed)
    assert took[len(took) // 2] == pytest.approx(0.1, rel=0.1)
    assert took[-1] < 0.15


def test_nobody_is_admitted_when_the_time_is_over():
    timed = Timed(cost(*SLOW), target=100)
    timed.stream(4)
    timed.read()
    for name in "ab":
        timed.scheduler.submit(request(name, [ord(name)] * 1000))
    plan = timed.step()
    assert (len(timed.chunks(plan)), plan.waiting) == (1, 1)
    assert plan.stalls[0].reason == "no_budget"
    assert plan.stalls[0].have == 0


@pytest.mark.parametrize(("prompt", "whole"), [(30, True), (64, True), (90, True), (140, False), (400, False)])
def test_a_newcomers_own_step_reads_a_prompt_whole_that_takes_up_to_twice_the_target(prompt, whole):
    """In the next step all earlier sequences decode again, and the rest of the prompt would get less time."""
    timed = Timed(cost(*SLOW), target=100, policy="fair", max_num_seqs=32)
    for number in range(200):
        timed.scheduler.submit(request(f"flood {number}", [number] * 64, max_tokens=32, tenant="flood"))
    for _ in range(100):
        timed.step()
    timed.scheduler.submit(request("calm", [500] * prompt, max_tokens=2, tenant="calm"))
    (row,) = timed.step().rows
    assert (row.count == prompt, row.sample) == (whole, whole)
    assert timed.took[-1] < 0.21
    if not whole:
        assert row.count < 55, "as much as the target has time for"


def test_drafts_get_no_time_that_a_prompt_could_have_used():
    timed = Timed(cost(*SLOW), target=100)
    timed.stream(2)
    timed.scheduler.submit(request("long", [9] * 1000))
    drafts = [Draft(f"stream {number}", (1, 1, 1)) for number in range(2)]
    plans = [timed.step(drafts) for _ in range(60)]
    reading = [plan for plan in plans if any(not row.sample for row in plan.rows)]
    assert len(reading) > 5
    assert not any(row.drafts for plan in reading for row in plan.rows)
    assert [len(row.drafts) for row in plans[-1].rows] == [3, 3]


def test_embeddings_alone_are_read_in_whole_steps_and_beside_streams_in_parts():
    timed = Timed(cost(*SLOW), target=100)
    timed.scheduler.submit(embedding("alone", range(250)))
    assert timed.step().rows[0].count == 250
    timed = Timed(cost(*SLOW), target=100)
    timed.stream(1)
    timed.scheduler.submit(embedding("beside", range(250)))
    assert max(timed.chunks(timed.step())) < 100


def test_a_model_that_looks_ahead_is_exempt():
    harness = Harness(config(max_model_len=16, prefix_caching=False, looks_ahead=True, step_target_ms=1))
    harness.submit(embedding("a", range(16)))
    assert [row.count for row in harness.plan().rows] == [16]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_target_changes_no_answer(depth, monkeypatch):
    monkeypatch.setattr(chunk_limit, "LEAST", 1)
    for seed in range(10):
        harness = run_workload(seed, depth, step_target_ms=1 + seed % 3)
        for seq_id, req in harness.requests.items():
            assert tuple(harness.tokens[seq_id]) == answer(req, harness.config)[0]


def test_a_target_below_nothing_is_refused():
    with pytest.raises(ConfigError, match="step_target_ms: must be at least 0"):
        config(step_target_ms=-1)
