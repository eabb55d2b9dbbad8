"""A queue of a request's outputs. Unread outputs are merged, so a slow reader costs one copy of its text.

It has one writer (the event loop, which gets outputs from the engine's thread after each step) and one reader, on the
same event loop. A `WaitingRoom` limits unread outputs; a reader over the limit gets an error, and its request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.contract.errors import PenstockError, ReaderTooSlow
from penstock.contract.events import ChoiceDelta, Output, RequestFailed, RequestFinished

__all__ = ["READER_BYTES", "OutputQueue", "WaitingRoom", "merge"]

READER_BYTES = 256 * 1024
"""Most bytes of unread outputs per reader: a thousand tokens, or sixty with 20 alternatives each."""
PATIENCE_SECONDS = 1.0
"""How long a reader with more unread bytes than that may go without reading."""
LOOKS = 2
"""How often a slow reader is checked in that time: with one check, a stalled event loop would look like slow reads."""

TOKEN_BYTES, ALTERNATIVE_BYTES = 240, 200
"""Measured with CPython 3.11: a `TokenPiece` with its numbers, without its bytes, which the vocabulary owns."""


def merge(waiting: list[Output], new: Iterable[Output]) -> None:
    """Append `new` to `waiting`, merging each delta into the previous unread delta of its choice.

    The order within a choice is the only one that matters, and it is kept: a choice's finish always follows its last
    delta.
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


class WaitingRoom:
    """Limits the unread outputs in the queues of one event loop, to which it is confined.

    A reader with more than `of_one` unread bytes that reads nothing for `patience` is given up. If all readers together
    have more than `of_all`, the reader with the most is given up at once, and its unread outputs are dropped.

    Args:
        of_all: maximum bytes of outputs in all queues.
        of_one: maximum bytes of outputs in one queue.
        patience: in seconds.

    Attributes:
        bytes: size of all unread outputs, and of the outputs that readers are sending.
        given_up: number of readers given up so far.
    """

    def __init__(self, of_all: int, of_one: int = READER_BYTES, patience: float = PATIENCE_SECONDS) -> None:
        self.of_one = of_one
        self.patience = patience
        self.bytes = 0
        self.given_up = 0
        self._of_all = of_all
        self._queues: dict[OutputQueue, int] = {}

    def note(self, queue: OutputQueue, size: int) -> None:
        """Note that a queue and its reader now have `size` bytes."""
        self.bytes += size - self._queues.get(queue, 0)
        if size:
            self._queues[queue] = size
        else:
            self._queues.pop(queue, None)
        while self.bytes > self._of_all and (most := max(self._queues, key=lambda each: each.lying)).lying:
            most.lose()


class OutputQueue:
    """The unread outputs of one request. Confined to one event loop.

    Args:
        room: limits unread outputs; None for no limit.
        abandon: ends the request if its reader is given up.

    Attributes:
        lying: approximate size of the unread outputs in bytes; 0 without a room.
        closed: whether no more outputs will come.
    """

    def __init__(self, room: WaitingRoom | None = None, abandon: Callable[[], None] = lambda: None) -> None:
        self._waiting: list[Output] = []
        self._error: PenstockError | None = None
        self._reader: asyncio.Future[None] | None = None  # done when there is something to read
        self._room = room
        self._abandon = abandon
        self._in_hand = 0  # bytes that the reader took last and is sending
        self._taken = 0  # how often the reader has read
        self._look: asyncio.TimerHandle | None = None
        self._left = False
        self.lying = 0
        self.closed = False

    @property
    def drained(self) -> bool:
        """Whether the reader has read everything, and no more will come."""
        return self.closed and not self._waiting and self._error is None

    def put(self, outputs: Iterable[Output]) -> None:
        """Add outputs; the terminal one closes the queue. Dropped if the reader was given up or has left."""
        if self._error is not None or self._left:
            return
        outputs = tuple(outputs)
        merge(self._waiting, outputs)
        self.closed = self.closed or bool(
            self._waiting and isinstance(self._waiting[-1], RequestFinished | RequestFailed)
        )
        if self._room is not None:
            self._lies(self.lying + sum(map(_size, outputs)), self._in_hand)
            if self._look is None and self.lying + self._in_hand > self._room.of_one:
                self._look_again(LOOKS, self._taken)
        self._wake()

    def fail(self, error: PenstockError) -> None:
        """Raise `error` in the reader once it has read the outputs in the queue; no more will come."""
        self._error = error
        self.closed = True
        self._wake()

    def lose(self) -> None:
        """Give up the reader and drop its unread outputs."""
        self._give_up()
        self._waiting.clear()
        self._lies(0, self._in_hand)

    async def take(self) -> list[Output]:
        """Wait for outputs, and take all of them.

        Raises:
            PenstockError: there are no more outputs, because the request was refused or the reader was given up.
        """
        self._taken += 1
        self._lies(self.lying, 0)
        if not self._waiting and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._waiting and self._error is not None:
            raise self._error
        taken, self._waiting = self._waiting, []
        self._lies(0, self.lying)
        return taken

    def leave(self) -> None:
        """The reader has left or has everything: drop the outputs in the queue and all that still come."""
        self._left = True
        self._waiting.clear()
        self._lies(0, 0)
        if self._look is not None:
            self._look.cancel()

    def _lies(self, lying: int, in_hand: int) -> None:
        self.lying, self._in_hand = lying, in_hand
        if self._room is not None:
            self._room.note(self, lying + in_hand)

    def _give_up(self) -> None:
        """End the request; the reader can still read the outputs in the queue, and then gets an error."""
        if self._room is None or self._error is not None:
            return
        self._room.given_up += 1
        if not self.closed:
            self._abandon()
        self.fail(ReaderTooSlow())

    def _look_again(self, left: int, taken: int) -> None:
        """Give up the reader if it still has too many unread bytes and does not read within `left` more checks."""
        assert self._room is not None
        self._look = None
        if self.closed or self.lying + self._in_hand <= self._room.of_one:
            return  # a complete answer does not grow any more, and may stay unread
        if taken != self._taken:
            left, taken = LOOKS, self._taken
        if not left:
            self._give_up()
            return
        seconds = self._room.patience / LOOKS
        self._look = asyncio.get_running_loop().call_later(seconds, self._look_again, left - 1, taken)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():  # done: woken already, or cancelled
            self._reader.set_result(None)


def _size(output: Output) -> int:
    """Approximate bytes of the parts that grow with an answer; a prompt's tokens, which come once, do not count."""
    if not isinstance(output, ChoiceDelta):
        return 0
    called = sum(len(piece.arguments) for piece in output.calls)
    alternatives = sum(len(token.top) for token in output.tokens)
    text = len(output.text) + len(output.reasoning) + called
    return text + TOKEN_BYTES * len(output.tokens) + ALTERNATIVE_BYTES * alternatives
