"""Read the outputs of several requests as one stream, fairly, with a limit on how many are in the engine.

Does not look into the outputs. Invariants: at most one output of each request is held here, so a slow reader costs
nothing; at most `at_once` requests are in the engine.
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
"""Pause between attempts to submit a request that the engine had no room for."""


async def take_in_turns(opened: Sequence[LiveRequest], at_once: int) -> AsyncGenerator[tuple[int, Output], None]:
    """Yield (prompt index, output), in turn from every prompt that has one.

    With `at_once`, a request that the engine's queue has no room for waits until another has ended. If the queue takes
    none at first, that error is raised. Once it has taken some, their work is not thrown away: the others are retried
    until they are taken or the reader gives up.

    Raises:
        PenstockError: as `EngineClient.generate`, from the first request that fails.
    """
    turns = _Turns(opened, at_once)
    turns.begin(len(opened))
    try:
        while turns.pending:
            done, _ = await asyncio.wait(turns.pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: turns.pending[task]):
                index, output = turns.result(task)
                if output is not None:
                    yield index, output
                    turns.go_on(index)
            if turns.waiting and not turns.pending:
                await asyncio.sleep(PAUSE_SECONDS)
                turns.begin(1)
    finally:
        await turns.cancel()


class _Turns:
    """Tracks which requests wait to begin, and which have a task that waits for their next output."""

    def __init__(self, opened: Sequence[LiveRequest], at_once: int) -> None:
        self.waiting = deque(range(len(opened)))
        self.pending: dict[asyncio.Task[Output | None], int] = {}
        self._opened = opened
        self._at_once = at_once
        self._taken = False  # whether the engine has taken any

    def begin(self, most: int) -> None:
        """Begin up to `most` of the waiting requests, within `at_once`."""
        for _ in range(min(most, len(self.waiting), (self._at_once or len(self._opened)) - len(self.pending))):
            self.go_on(self.waiting.popleft())

    def go_on(self, index: int) -> None:
        """Wait for the next output of a request."""
        self.pending[asyncio.create_task(self._opened[index].next())] = index

    def result(self, task: asyncio.Task[Output | None]) -> tuple[int, Output | None]:
        """The index of a finished task's request, and its output; None if it has ended or must wait."""
        index = self.pending.pop(task)
        try:
            output = task.result()
        except Overloaded:
            if not self._at_once or not (self.pending or self._taken):
                raise
            self._opened[index].renew()
            self.waiting.appendleft(index)
            return index, None
        self._taken = True
        if output is None:
            self.begin(2)  # in its place, and in one lost earlier when the engine had no room
        return index, output

    async def cancel(self) -> None:
        """End every task."""
        for task in self.pending:
            task.cancel()
        await asyncio.gather(*self.pending, return_exceptions=True)
