"""Reading the outputs of several requests as one stream, fairly, with a limit on how many are in the engine.

Knows nothing of what the outputs say. Invariants: at most one output of each request is held here, so a slow reader
costs nothing; at most `at_once` requests are in the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from penstock.contract.errors import Overloaded
from penstock.contract.events import Output
from penstock.server.delivery.live_requests import LiveRequest

__all__ = ["take_in_turns"]

PAUSE_SECONDS = 0.2
"""Between two tries to submit a request that the engine had no room for."""


async def take_in_turns(opened: Sequence[LiveRequest], at_once: int) -> AsyncGenerator[tuple[int, Output], None]:
    """(prompt index, output), taking in turn from every prompt that has something.

    With `at_once`, a request that the engine's queue has no room for waits until another has ended. If there is no
    room for any from the beginning, the caller is told so. Once some were taken, their work is not thrown away: the
    others are tried again until they are taken, or until whoever reads this gives up.

    Raises:
        PenstockError: as `EngineClient.generate`, of the first request that fails.
    """
    waiting = deque(range(len(opened)))
    pending: dict[asyncio.Task[Output | None], int] = {}
    taken = False

    def go_on(index: int) -> None:
        pending[asyncio.create_task(opened[index].next())] = index

    def begin(most: int) -> None:
        """Let some of the waiting ones begin."""
        for _ in range(min(most, len(waiting), (at_once or len(opened)) - len(pending))):
            go_on(waiting.popleft())

    begin(len(opened))
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: pending[task]):
                index = pending.pop(task)
                try:
                    output = task.result()
                except Overloaded:
                    if not at_once or not (pending or taken):
                        raise
                    opened[index].renew()
                    waiting.appendleft(index)
                    continue
                taken = True
                if output is not None:
                    yield index, output
                    go_on(index)
                else:
                    begin(2)  # its place, and one that was lost when the engine had no room
            if waiting and not pending:
                await asyncio.sleep(PAUSE_SECONDS)
                begin(1)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
