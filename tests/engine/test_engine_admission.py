"""What the queue refuses, and whether its advice on when to retry is good."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_harness import build, request_of

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import Overloaded
from penstock.contract.measurements import Timings
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.request import EngineRequest
from penstock.engine import EngineLoop, LocalClient
from penstock.engine.admission import Admission, QueueLimits


class Slowed:
    """A runner that reports a thousand times as long for its steps."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        self.seconds += 1000 * result.seconds
        return replace(result, seconds=1000 * result.seconds)

    def reset(self) -> bool:
        return self._runner.reset()


class Bench:
    """An engine whose steps take seconds, and its admission."""

    def __init__(self, limits: QueueLimits, **options) -> None:
        self.harness = build(around=self._around, num_blocks=256, **options)
        self.admission = Admission(self.harness.engine.scheduler, limits)
        self.number = 0

    def _around(self, runner) -> Slowed:
        self.runner = Slowed(runner)
        return self.runner

    def resolved(self, letters: int = 100, n: int = 1, **rules):
        self.number += 1
        prompt = f"{chr(ord('a') + self.number % 26)}{chr(ord('a') + self.number // 26)}" * (letters // 2)
        request = request_of(f"r{self.number}", self.harness.text, prompt, n=n, **{"max_tokens": 4, **rules})
        return self.harness.intake.resolve(request)

    def submit(self, count: int = 1, **rules) -> None:
        for _ in range(count):
            self.harness.engine.submit(self.resolved(**rules))

    def refusal(self, **rules) -> Overloaded | None:
        return self.refused(self.resolved(**rules))

    def refused(self, resolved) -> Overloaded | None:
        try:
            self.admission.check(resolved)
        except Overloaded as refused:
            return refused
        return None


def experienced(limits: QueueLimits, **options) -> Bench:
    """A bench that has computed a few requests before."""
    bench = Bench(limits, **options)
    for _ in range(4):
        bench.submit(4)
        while bench.harness.engine.has_work:
            bench.harness.engine.step()
    return bench


def test_an_empty_engine_takes_everything():
    for bench in (Bench(QueueLimits(seconds=1)), experienced(QueueLimits(seconds=1))):
        assert bench.refusal(letters=120) is None


def test_nothing_is_refused_while_nothing_is_known():
    bench = Bench(QueueLimits(seconds=1))
    bench.submit(8)
    assert bench.refusal() is None


def test_without_a_limit_any_wait_is_taken():
    bench = experienced(QueueLimits())
    bench.submit(30)
    bench.harness.engine.step()
    assert bench.refusal() is None


def test_a_longer_wait_is_refused_and_after_the_time_that_is_told_it_is_not():
    bench = experienced(QueueLimits(seconds=60), step_target_ms=3000)
    bench.submit(8)
    bench.harness.engine.step()
    refused = bench.refusal()
    assert refused is not None
    assert "s to begin this; the queue takes 60 s." in refused.message
    assert 1 < refused.retry_after < 120
    began = bench.runner.seconds
    while bench.refusal() is not None:
        bench.harness.engine.step()
    assert bench.runner.seconds - began == pytest.approx(refused.retry_after, rel=0.3)


def test_who_has_to_wait_for_a_slot_is_told_when_one_is_free_by_how_long_answers_took():
    bench = experienced(QueueLimits(seconds=5), max_num_seqs=2)
    bench.submit(2, letters=2, max_tokens=100)
    bench.harness.engine.step()
    assert bench.refusal(letters=2) is None, "nobody has ended yet"
    bench.admission.ended(Timings(admitted=10.0, ended=90.0))
    refused = bench.refusal(letters=2)
    assert refused is not None
    assert refused.retry_after == 40 - 5


def within(resolved, seconds: float):
    """The same request from a caller that allows this long for it."""
    return replace(resolved, max_seconds=seconds)


def test_what_cannot_begin_in_its_own_time_is_refused_and_told_when_it_could():
    bench = experienced(QueueLimits(), max_num_seqs=2)
    bench.submit(2, letters=2, max_tokens=100)
    bench.harness.engine.step()
    bench.admission.ended(Timings(admitted=10.0, ended=90.0))
    assert bench.refusal(letters=2) is None, "it has all the time in the world"
    assert bench.refused(within(bench.resolved(letters=2), 60)) is None
    refused = bench.refused(within(bench.resolved(letters=2), 5))
    assert refused is not None
    assert refused.message == "It would take about 40 s to begin this, and it may take 5 s in all."
    assert refused.retry_after == 40 - 5


def test_an_idle_engine_takes_what_has_little_time():
    bench = experienced(QueueLimits())
    assert bench.refused(within(bench.resolved(), 0.001)) is None


@pytest.mark.parametrize("embedded", [False, True])
def test_the_time_that_a_caller_allows_reaches_the_queue(embedded):
    bench = build()
    one = request_of("r", bench.text, "a prompt")
    if embedded:
        one = EngineRequest("r", one.prompt, embedding=EmbeddingSpec(Pooling.LAST))
    assert bench.intake.resolve(replace(one, max_seconds=2.5)).max_seconds == 2.5
    assert bench.intake.resolve(one).max_seconds == 0


def test_a_queue_that_is_full_is_refused_whatever_it_takes():
    bench = Bench(QueueLimits(sequences=2, tokens=500), max_num_seqs=1)
    bench.submit(2, letters=100)
    bench.harness.engine.step()
    assert bench.refusal() is None
    assert "1 sequences are waiting already; the queue takes 2." in bench.refusal(n=2).message
    assert bench.refusal(n=2).retry_after == 1
    bench.submit(letters=100)
    assert "2 sequences are waiting" in bench.refusal().message
    tokens = Bench(QueueLimits(tokens=150), max_num_seqs=1)
    tokens.submit(2, letters=100)
    tokens.harness.engine.step()
    assert "100 tokens are waiting already; the queue takes 150." in tokens.refusal(letters=60).message


def test_tenants_have_parts_of_the_queue_and_one_is_kept_free():
    bench = Bench(QueueLimits(sequences=6), max_num_seqs=1, policy="fair")

    def of(tenant: str):
        resolved = bench.resolved()
        return replace(resolved, sequences=tuple(replace(each, tenant=tenant) for each in resolved.sequences))

    def taken(tenant: str) -> int:
        count = 0
        while bench.refused(one := of(tenant)) is None:
            bench.harness.engine.submit(one)
            count += 1
        assert "your part of the queue takes" in bench.refused(one).message
        return count

    bench.harness.engine.submit(of("flood"))
    bench.harness.engine.step()
    assert taken("flood") == 3, "half of it while nobody else waits"
    assert taken("calm") == 2
    assert taken("flood") == 0


async def test_the_loop_refuses_and_counts_and_serves_the_others():
    bench = build(around=Slowed, num_blocks=256, max_num_seqs=2)
    loop = EngineLoop(bench.engine, bench.clock, QueueLimits(1000, seconds=5))
    loop.start()
    client = LocalClient(bench.intake, loop)

    async def answer(number: int) -> int:
        one = request_of(f"r{number}", bench.text, chr(ord("a") + number) * 100, max_tokens=3)
        return len([output async for output in client.generate(one)])

    try:
        assert await answer(0) > 0
        ended = await asyncio.gather(*[answer(number) for number in range(1, 20)], return_exceptions=True)
        refused = [each for each in ended if isinstance(each, Overloaded)]
        assert 0 < len(refused) < 19
        assert all(isinstance(each, int | Overloaded) for each in ended)
        assert client.measurements().rejections == len(refused)
    finally:
        await asyncio.to_thread(client.close)
