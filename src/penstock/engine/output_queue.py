"""A queue that merges: outputs that were not taken yet are joined, so a slow reader costs one copy of its text.

One writer (the event loop, fed by the engine's thread once a step) and one reader, both on the same event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.contract.errors import PenstockError
from penstock.contract.events import ChoiceDelta, Output, RequestFailed, RequestFinished

__all__ = ["OutputQueue", "merge"]


def merge(waiting: list[Output], new: Iterable[Output]) -> None:
    """Append `new` to `waiting`, joining each delta to the last one of its choice where nothing of it lies between.

    A choice's finish always follows its last delta, so joining with any earlier delta of the same choice keeps the
    order within the choice, which is the only order that matters.
    """
    latest = {output.choice: index for index, output in enumerate(waiting) if isinstance(output, ChoiceDelta)}
    for output in new:
        if not isinstance(output, ChoiceDelta):
            waiting.append(output)
            continue
        index = latest.get(output.choice)
        if index is None:
            latest[output.choice] = len(waiting)
            waiting.append(output)
            continue
        before = waiting[index]
        assert isinstance(before, ChoiceDelta)
        waiting[index] = before.then(output)


class OutputQueue:
    """Outputs of one request on their way to its reader. Confined to one event loop."""

    def __init__(self) -> None:
        self._waiting: list[Output] = []
        self._error: PenstockError | None = None
        self._reader: asyncio.Future[None] | None = None  # who waits
        self.closed = False

    @property
    def drained(self) -> bool:
        """Whether the reader has taken everything that will ever come."""
        return self.closed and not self._waiting

    def put(self, outputs: Iterable[Output]) -> None:
        """Add outputs; the terminal one closes the queue."""
        merge(self._waiting, outputs)
        self.closed = self.closed or bool(
            self._waiting and isinstance(self._waiting[-1], RequestFinished | RequestFailed)
        )
        self._wake()

    def fail(self, error: PenstockError) -> None:
        """Tell the reader that the request was refused; there will be no outputs."""
        self._error = error
        self.closed = True
        self._wake()

    async def take(self) -> list[Output]:
        """Wait for outputs and take all there are.

        Raises:
            PenstockError: the request was refused.
        """
        if not self._waiting and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        taken, self._waiting = self._waiting, []
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():  # done: woken already, or cancelled
            self._reader.set_result(None)
