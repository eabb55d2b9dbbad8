"""What sequences wait for in the queue, and behind which other sequences.

The queue moves when its head can be admitted, so all waiting sequences wait for what the head lacks. One sum of seconds
for each reason then serves all of them: a sequence takes the differences between its admission and its submission, and
a waiting sequence adds nothing to the cost of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from penstock.contract.measurements import NEXT_STEP
from penstock.contract.plan import Stall

__all__ = ["MOST_NAMED", "QueueClock", "Wait"]

MOST_NAMED = 8
"""The most sequences that are named as what another sequence waited for."""

_REMEMBERED = 64
"""How many episodes are remembered, with the names of the sequences that others waited for."""


@dataclass(frozen=True, slots=True)
class _Episode:
    """A time in which one head of the queue waited for one thing.

    Attributes:
        number: counts from 1.
        head: the sequence that waited.
        reason: what it waited for.
        holders: the sequences that ran when it began, the longest-running first.
    """

    number: int
    head: str
    reason: str
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """The beginning of a wait: the sums at that time, and the number of the first episode that concerns it."""

    sums: dict[str, float]
    first: int


class QueueClock:
    """Sums the seconds in which the queue waited, by reason. Owned by the book.

    Attributes:
        sums: seconds by reason, since the start; they go on while nobody waits.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._reason = NEXT_STEP
        self._until = 0.0
        self._number = 0
        self._episodes: deque[_Episode] = deque(maxlen=_REMEMBERED)

    def advance(self, at: float) -> None:
        """Add the time until `at` to the sum of the present reason; nothing changes if it was added already."""
        if at <= self._until:
            return
        self.sums[self._reason] = self.sums.get(self._reason, 0.0) + at - self._until
        self._until = at

    def planned(self, stalls: tuple[Stall, ...], running: Iterable[str]) -> None:
        """Note that a step begins, with these running sequences, and why the queue's head was not admitted, if so."""
        if not stalls:
            self._reason = NEXT_STEP
            return
        head, self._reason = stalls[0].seq_id, stalls[0].reason.value
        if self._episodes and (self._episodes[-1].head, self._episodes[-1].reason) == (head, self._reason):
            return
        self._number += 1
        self._episodes.append(_Episode(self._number, head, self._reason, tuple(islice(running, MOST_NAMED))))

    def begin(self, at: float) -> Wait:
        """Begin the wait of a sequence."""
        self.advance(at)
        return Wait(dict(self.sums), self._number + (self._reason == NEXT_STEP))

    def end(self, wait: Wait) -> dict[str, float]:
        """Seconds by reason of a wait that lasted until the last `advance`."""
        before = wait.sums
        return {
            reason: seconds - before.get(reason, 0.0)
            for reason, seconds in self.sums.items()
            if seconds > before.get(reason, 0.0)
        }

    def behind(self, wait: Wait, seq_id: str) -> tuple[str, ...]:
        """Ids of the sequences that a sequence has waited for: heads of the queue before it, then running sequences."""
        episodes = [each for each in self._episodes if each.number >= wait.first]
        named = dict.fromkeys(each.head for each in episodes if each.head != seq_id)
        for each in episodes:
            named |= dict.fromkeys(holder for holder in each.holders if holder != seq_id)
        return tuple(islice(named, MOST_NAMED))
