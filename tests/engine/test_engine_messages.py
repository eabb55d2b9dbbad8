"""Messages between the engine's thread and many readers on several event loops, with threads switched at odd moments.

`PENSTOCK_MESSAGES` says how many (5,000 by default; a million in deep runs).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import engine_harness as harness
import pytest
from engine_harness import Harness, finishes_of, terminal_of, tokens_of

from penstock.contract.events import ChoiceDelta, FinishReason, Output, RequestFinished
from penstock.engine import EngineLoop, LocalClient
from penstock.engine.admission import QueueLimits
from penstock.engine.output_queue import OutputQueue

MESSAGES = int(os.environ.get("PENSTOCK_MESSAGES", "5000"))
EVENT_LOOPS, READERS = 3, 24
PATIENCE = 600.0  # seconds


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads lose Python's lock a thousand times as often as usual: at moments that nobody foresaw."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


class Post:
    """What was sent, counted by kind: to the engine by its readers, and by the engine in outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: Counter[str] = Counter()
        for owner, name in ((EngineLoop, "submit"), (EngineLoop, "abort"), (EngineLoop, "run_between_steps")):
            monkeypatch.setattr(owner, name, self._counting(name, getattr(owner, name)))
        put = OutputQueue.put

        def counted_put(queue: OutputQueue, outputs: list[Output]) -> None:
            self.sent["outputs"] += len(outputs)
            put(queue, outputs)

        monkeypatch.setattr(OutputQueue, "put", counted_put)

    def _counting(self, name, call):
        def counted(*arguments):
            self.sent[name] += 1
            return call(*arguments)

        return counted

    @property
    def total(self) -> int:
        return self.sent.total()


async def read(client: LocalClient, bench: Harness, post: Post, name: str) -> None:
    """Ask again and again, in one of several ways, and compare every token."""
    rng, number = random.Random(name), 0
    while post.total < MESSAGES:
        number += 1
        prompt, count, n = "abcdefgh"[: rng.randrange(1, 9)], rng.randrange(1, 40), rng.choice([1, 1, 1, 2])
        seed = rng.randrange(99)
        one = harness.request_of(f"{name}-{number}", bench.text, prompt, max_tokens=count, n=n, seed=seed)
        expected = [bench.expected(prompt, count, seed, choice) for choice in range(n)]
        leaves = rng.choice([None, None, "closes", "aborts"])
        outputs: list[Output] = []
        stream = client.generate(one)
        async for output in stream:
            outputs.append(output)
            if rng.random() < 0.1:
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.0005]))
            if leaves and isinstance(output, ChoiceDelta) and rng.random() < 0.1:
                if leaves == "closes":
                    break
                await client.abort(one.id)
            if rng.random() < 0.01:
                await client.heartbeat()
        await stream.aclose()
        whole = leaves is None
        for choice in range(n):
            said = tokens_of(outputs, choice)
            assert said == expected[choice][: len(said)], f"{one.id}: lost, twice or out of order"
            ends = [end for end in finishes_of(outputs) if end.choice == choice]
            assert len(ends) <= 1
            assert not whole or len(said) == count
            assert not ends or ends[0].reason is FinishReason.ABORT or len(said) == count
        if leaves != "closes":
            assert isinstance(terminal_of(outputs), RequestFinished)


def test_no_message_is_lost_twice_or_out_of_order(restless, monkeypatch):
    post = Post(monkeypatch)
    bench = harness.build(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256, depth=2)
    engine_loop = EngineLoop(bench.engine, bench.clock, QueueLimits(1000))
    client = LocalClient(bench.intake, engine_loop)
    engine_loop.start()
    errors: list[BaseException] = []

    async def readers(place: int) -> None:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for number in range(READERS):
                group.create_task(read(client, bench, post, f"{place}-{number}"))

    def event_loop(place: int) -> None:
        try:
            asyncio.run(readers(place))
        except BaseException as error:  # raised by the test's own thread below
            errors.append(error)

    threads = [threading.Thread(target=event_loop, args=(place,)) for place in range(EVENT_LOOPS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        client.close()
    for error in errors:
        raise error
    assert post.total >= MESSAGES
    assert min(post.sent[kind] for kind in ("submit", "abort", "run_between_steps", "outputs")) > MESSAGES / 1000
    assert not bench.engine._owners
    bench.engine.scheduler.check()
    print(f"messages: {dict(post.sent)}")
