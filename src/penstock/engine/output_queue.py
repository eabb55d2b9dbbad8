"""A queue that merges: outputs that were not taken yet are joined, so a slow reader costs one copy of its text.

One writer (the event loop, fed by the engine's thread once a step) and one reader, both on the same event loop. Where
there is a `WaitingRoom`, what a reader leaves lying is bounded too: it is given up, and told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.contract.errors import PenstockError, ReaderTooSlow
from penstock.contract.events import ChoiceDelta, Output, RequestFailed, RequestFinished

__all__ = ["READER_BYTES", "OutputQueue", "WaitingRoom", "merge"]

READER_BYTES = 256 * 1024
"""Of outputs that one reader may leave lying: a thousand tokens, or sixty with 20 alternatives each."""
PATIENCE_SECONDS = 1.0
"""How long a reader beyond that may take nothing."""
LOOKS = 2
"""In this time, so that one stall of the event loop, in which nobody could take anything, is nobody's end."""

TOKEN_BYTES, ALTERNATIVE_BYTES = 240, 200
"""As measured with CPython 3.11: a `TokenPiece` with its numbers; its bytes are the vocabulary's."""


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


class WaitingRoom:
    """Bounds what lies in the queues of one event loop. Confined to it.

    A reader that lets more than `of_one` lie, and takes nothing for `patience`, is given up. Where all of them
    together exceed `of_all`, the one for whom most lies is given up at once, and loses it.

    Args:
        of_all: bytes of outputs in all queues.
        of_one: the same of one queue.
        patience: seconds.

    Attributes:
        bytes: what lies there now, and what readers have in hand.
        given_up: readers so far.
    """

    def __init__(self, of_all: int, of_one: int = READER_BYTES, patience: float = PATIENCE_SECONDS) -> None:
        self.of_one = of_one
        self.patience = patience
        self.bytes = 0
        self.given_up = 0
        self._of_all = of_all
        self._queues: dict[OutputQueue, int] = {}

    def note(self, queue: OutputQueue, size: int) -> None:
        """A queue and its reader have `size` bytes now."""
        self.bytes += size - self._queues.get(queue, 0)
        if size:
            self._queues[queue] = size
        else:
            self._queues.pop(queue, None)
        while self.bytes > self._of_all and (most := max(self._queues, key=lambda each: each.lying)).lying:
            most.lose()


class OutputQueue:
    """Outputs of one request on their way to its reader. Confined to one event loop.

    Args:
        room: bounds what may lie here; None for any amount.
        abandon: ends the request, when its reader is given up.

    Attributes:
        lying: bytes that nobody has taken yet, nearly; 0 without a room.
        closed: whether no more will come.
    """

    def __init__(self, room: WaitingRoom | None = None, abandon: Callable[[], None] = lambda: None) -> None:
        self._waiting: list[Output] = []
        self._error: PenstockError | None = None
        self._reader: asyncio.Future[None] | None = None  # who waits
        self._room = room
        self._abandon = abandon
        self._in_hand = 0  # bytes that the reader took last, and is busy with
        self._taken = 0  # how often it has come
        self._look: asyncio.TimerHandle | None = None
        self._left = False
        self.lying = 0
        self.closed = False

    @property
    def drained(self) -> bool:
        """Whether the reader has taken everything that will ever come."""
        return self.closed and not self._waiting and self._error is None

    def put(self, outputs: Iterable[Output]) -> None:
        """Add outputs; the terminal one closes the queue. What comes after a reader was given up is lost."""
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
        """Tell the reader that the request was refused; there will be no outputs."""
        self._error = error
        self.closed = True
        self._wake()

    def lose(self) -> None:
        """Give the reader up, who gets nothing of what lies here."""
        self._give_up()
        self._waiting.clear()
        self._lies(0, self._in_hand)

    async def take(self) -> list[Output]:
        """Wait for outputs and take all there are.

        Raises:
            PenstockError: the request was refused; or the reader was given up, and has taken what lay here.
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
        """The reader has gone, or has all; what still comes is for nobody."""
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
        """End the request; its reader gets what lies here, and then an error."""
        if self._room is None or self._error is not None:
            return
        self._room.given_up += 1
        if not self.closed:
            self._abandon()
        self.fail(ReaderTooSlow())

    def _look_again(self, left: int, taken: int) -> None:
        """Give the reader up if it still lets too much lie, and has not come in `left` more looks."""
        assert self._room is not None
        self._look = None
        if self.closed or self.lying + self._in_hand <= self._room.of_one:
            return  # of an answer that is complete no more will come: its end may lie here
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
    """Bytes of memory, nearly. Only of what grows with an answer: a prompt's tokens come once."""
    if not isinstance(output, ChoiceDelta):
        return 0
    called = sum(len(piece.arguments) for piece in output.calls)
    alternatives = sum(len(token.top) for token in output.tokens)
    text = len(output.text) + len(output.reasoning) + called
    return text + TOKEN_BYTES * len(output.tokens) + ALTERNATIVE_BYTES * alternatives
