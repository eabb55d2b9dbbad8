"""The queue as other threads see it: what is refused without waiting for a step, and what is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_harness import build, request_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import Overloaded, RefusalCause
from penstock.contract.plan import StepPlan, StepResult
from penstock.core.waiting import QueuePart, QueueParts
from penstock.engine import EngineLoop, LocalClient, QueueLimits
from penstock.engine.admission import Admission
from penstock.engine.recent_queue import RecentQueue

PATIENCE = 30
BENCH = build(num_blocks=256)


def resolved(name: str, tenant: str = "", n: int = 1, letters: int = 4):
    request = request_of(name, BENCH.text, "a" * letters, n=n, max_tokens=4)
    return BENCH.intake.resolve(replace(request, tenant=tenant))


def refusal(check: Callable[..., None], *arguments: object) -> Overloaded | None:
    try:
        check(*arguments)
    except Overloaded as refused:
        return refused
    return None


def refused_at_once(queue: RecentQueue, tenant: str = "") -> Overloaded | None:
    return refusal(queue.check, tenant)


def told(refused: Overloaded | None) -> tuple[object, ...]:
    return () if refused is None else (refused.message, refused.retry_after, refused.cause)


def shared(sequences: int, tokens: int = 0) -> QueueParts:
    return QueueParts({}, QueuePart(sequences, tokens, 1), shared=True)


def test_a_full_queue_refuses_and_says_when_it_will_have_ended():
    queue = RecentQueue(QueueLimits(sequences=8))
    assert refused_at_once(queue) is None, "nothing was shown yet"
    queue.show(shared(7), 1.5)
    assert refused_at_once(queue) is None
    queue.show(shared(8), 1.5)
    refused = refused_at_once(queue)
    assert refused is not None
    assert (refused.cause, refused.retry_after) == (RefusalCause.QUEUE_SEQUENCES, 12)
    assert refused.message == "8 sequences are waiting already; the queue takes 8."


def test_tokens_that_wait_leave_room_or_not():
    long = resolved("long", letters=100)
    queue = RecentQueue(QueueLimits(tokens=long.num_tokens - 1))
    queue.show(shared(3, long.num_tokens - 2), 0.0)
    assert refused_at_once(queue) is None
    queue.show(shared(3, long.num_tokens - 1), 0.0)
    refused = refused_at_once(queue)
    assert refused is not None
    assert refused.cause is RefusalCause.QUEUE_TOKENS
    queue.show(shared(0, 0), 0.0)
    queue.add(long)


def test_what_came_since_counts_until_the_engine_has_taken_it():
    queue = RecentQueue(QueueLimits(sequences=4))
    first, second = resolved("first", n=2), resolved("second", n=2)
    queue.add(first)
    queue.add(second)
    with pytest.raises(Overloaded):
        queue.add(resolved("third"))
    assert refused_at_once(queue) is not None
    assert queue.show(shared(2), 0.0, [first]) == 2, "so many were refused"
    assert refused_at_once(queue) is not None
    assert queue.show(shared(2), 0.0, [second]) == 1
    assert refused_at_once(queue) is None


def test_a_tenant_with_room_in_its_part_is_not_refused_because_others_fill_theirs():
    queue = RecentQueue(QueueLimits(sequences=9))
    queue.show(QueueParts({"flood": QueuePart(4, 40, 2)}, QueuePart(0, 0, 3), shared=False), 1.0)
    refused = refused_at_once(queue, "flood")
    assert refused is not None
    assert refused.message == "4 sequences are waiting already; your part of the queue takes 4."
    for number in range(3):
        queue.add(resolved(f"c{number}", "calm"))
    assert refused_at_once(queue, "calm") is not None
    assert refused_at_once(queue, "other") is None


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 8))
def test_it_decides_as_the_engine_would_from_the_same_queue(policy: str, tenants: list[str], most: int):
    bench = build(num_blocks=256, policy=policy)
    admission, recent = Admission(bench.engine.scheduler, QueueLimits(most)), RecentQueue(QueueLimits(most))
    for number, tenant in enumerate(tenants):
        bench.engine.submit(resolved(f"r{number}", tenant))
    recent.show(*admission.look())
    for tenant in "abcd":
        by_the_engine = refusal(admission.check, resolved("new", tenant, letters=1))
        assert told(refusal(recent.check, tenant)) == told(by_the_engine)


class Held:
    """A runner whose steps wait until they may end."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.runs = threading.Event()
        self.may_end = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        self.runs.set()
        assert self.may_end.wait(PATIENCE)
        return self._runner.run(plan)

    def reset(self) -> bool:
        return self._runner.reset()


async def test_who_comes_in_the_middle_of_a_step_is_refused_before_its_end_and_nobody_is_lost():
    held: list[Held] = []
    bench = build(around=lambda runner: held.append(Held(runner)) or held[0], num_blocks=256, max_num_seqs=1)
    loop = EngineLoop(bench.engine, bench.clock, QueueLimits(2))
    loop.start()
    client = LocalClient(bench.intake, loop)

    async def answer(name: str) -> int:
        one = request_of(name, bench.text, "hello", max_tokens=3)
        return len([output async for output in client.generate(one)])

    try:
        first = asyncio.create_task(answer("first"))
        assert await asyncio.to_thread(held[0].runs.wait, PATIENCE)
        client.check_queue("")
        others = [asyncio.create_task(answer(f"r{number}")) for number in range(6)]
        async with asyncio.timeout(PATIENCE):
            while sum(each.done() for each in others) < 4:
                await asyncio.sleep(0.001)
        assert all(isinstance(each.exception(), Overloaded) for each in others if each.done())
        with pytest.raises(Overloaded):
            client.check_queue("")
        held[0].may_end.set()
        ended = await asyncio.gather(first, *others, return_exceptions=True)
        assert sum(isinstance(each, int) for each in ended) == 3
        client.check_queue("")
        assert client.measurements().rejections == 5
    finally:
        held[0].may_end.set()
        await asyncio.to_thread(client.close)
    bench.engine.scheduler.check()
