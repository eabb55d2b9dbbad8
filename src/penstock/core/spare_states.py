"""Spare places for recurrent state, from which a sequence continues after a wrong draft.

A row with drafts writes the state before each draft to a spare place. Once it is known how many drafts were right, one
of these places holds the state to continue from, and the others are free again. Decides which place is handed out next;
does not know plans. Invariant: every place is free, written by a plan in flight, or held by one running sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract.errors import EngineFault

__all__ = ["NO_SPARE", "SpareStates"]

NO_SPARE = -1


class SpareStates:
    """All spare places of an engine. Owned by the scheduler.

    Args:
        count: number of places.

    Attributes:
        written: places that plans in flight write.
    """

    __slots__ = ("_count", "_free", "_held", "written")

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(reversed(range(count)))
        self._held: set[int] = set()
        self.written: set[int] = set()

    @property
    def available(self) -> int:
        """Number of free places."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` free places, which there must be, for a plan to write to."""
        taken = tuple(self._free.pop() for _ in range(count))
        self.written.update(taken)
        return taken

    def settle(self, places: Iterable[int], kept: int) -> None:
        """The plan that wrote `places` was committed: a sequence holds `kept` (or `NO_SPARE`), the others are free."""
        for place in places:
            self.written.remove(place)
            if place != kept:
                self._free.append(place)
        if kept != NO_SPARE:
            self._held.add(kept)

    def give_back(self, place: int) -> None:
        """No sequence holds this place any more; the next plan may write to it.

        Call when its sequence leaves, or when all rows of the plan that reads it have their places: within a plan, a
        row could write to it before it is read.
        """
        self._held.remove(place)
        self._free.append(place)

    def drop_written(self) -> None:
        """Free all written places: no plan in flight will ever be committed."""
        self._free += sorted(self.written)
        self.written.clear()

    def check(self, held: Iterable[int]) -> None:
        """Verify the invariant.

        Args:
            held: places that running sequences hold.

        Raises:
            EngineFault: it does not hold.
        """
        places = sorted([*self._free, *self.written, *held])
        if places != list(range(self._count)) or sorted(held) != sorted(self._held):
            raise EngineFault("spare states: not so: every place is free, written by a plan in flight, or held by one")
