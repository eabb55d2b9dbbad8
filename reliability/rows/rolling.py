"""R32: two servers behind a balancer, restarted in turn while clients ask without a pause."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import ExitStack

from harness.balancer import Balancer
from harness.batches import answers_to, difference
from harness.client import ask, said
from harness.requests import Request, mixed_requests
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving

__all__ = ["rolling_restarts"]

RESTARTS = 10
CLIENTS = 12
SMALL = (*APART, "--kv-cache-memory", "128MiB")
READY_SECONDS = 60.0


class _Replica:
    """A server that can be replaced by another one."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.server = self._start()

    def _start(self) -> Server:
        return self._stack.enter_context(serving(*SMALL, ends_with=None))

    def restart(self) -> str:
        """End the server in order, and start another; returns what was wrong with its end, or ""."""
        self.server.process.send_signal(signal.SIGTERM)
        status = self.server.process.wait(60)
        self.server = self._start()
        return f"a server ended with status {status}" if status else ""


def rolling_restarts(depth: Depth, progress: Progress) -> Measured:
    """R32: every request is answered as it would have been without restarts."""
    restarts = depth.of(RESTARTS, quick=2)
    progress.expect(restarts)
    requests = mixed_requests(30, 48)
    with ExitStack() as stack:
        replicas = [_Replica(stack) for _ in range(2)]
        want = [said(each) for each in answers_to(replicas[0].server, requests)]
        balancer = Balancer([each.server.port for each in replicas])
        answered, misses = asyncio.run(_under_load(balancer, replicas, requests, want, restarts, progress))
    figure = (
        f"{restarts} restarts under {CLIENTS} clients: {answered} requests answered, {balancer.passed_on} passed on"
    )
    return judge(figure, misses, answered=answered, passed_on=balancer.passed_on)


async def _under_load(
    balancer: Balancer,
    replicas: list[_Replica],
    requests: list[Request],
    want: list[dict[str, object]],
    restarts: int,
    progress: Progress,
) -> tuple[int, list[str]]:
    misses: list[str] = []
    answered, over = 0, asyncio.Event()

    async def client(number: int) -> None:
        nonlocal answered
        chance = random.Random(number)
        while not over.is_set():
            index = chance.randrange(len(requests))
            answer = await ask(url, requests[index].path, requests[index].streamed())
            wrong = difference(requests[index], want[index], answer)
            answered += not wrong
            if wrong:
                misses.append(wrong)

    async with balancer.listening() as url:
        clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        for number in range(restarts):
            replica = replicas[number % 2]
            before = replica.server.port
            misses += filter(None, [await asyncio.to_thread(replica.restart)])
            balancer.ports[balancer.ports.index(before)] = replica.server.port
            async with asyncio.timeout(READY_SECONDS):
                while replica.server.port not in balancer.ready:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(2.0)
            progress.update()
        over.set()
        await asyncio.gather(*clients)
    return answered, misses
