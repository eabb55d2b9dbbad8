"""In which order sequences are served, and the queue of those that wait.

Decides order only, never whether somebody fits. Invariant: a rank orders any two sequences in one way, so a plan never
depends on anything but its inputs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from penstock.contract.plan import Stall
from penstock.contract.request import GenerateRequest
from penstock.core.sequence import Seq

__all__ = ["RANKINGS", "SeqList", "WaitingQueue"]

Rank = tuple[float, ...]


def _first_come(request: GenerateRequest, order: int) -> Rank:
    return (request.arrival, order)


def _by_priority(request: GenerateRequest, order: int) -> Rank:
    return (request.priority, request.arrival, order)


RANKINGS: dict[str, Callable[[GenerateRequest, int], Rank]] = {"fcfs": _first_come, "priority": _by_priority}
"""Policy name -> rank of a request that was the `order`-th to be submitted; the smallest rank is served first."""


def _rank(seq: Seq) -> Rank:
    return seq.rank


class SeqList:
    """Sequences in policy order. Finding one costs a binary search, whatever their number."""

    __slots__ = ("_seqs",)

    def __init__(self) -> None:
        self._seqs: list[Seq] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._seqs)

    def __getitem__(self, index: int) -> Seq:
        return self._seqs[index]

    def __contains__(self, seq: Seq) -> bool:
        index = bisect_left(self._seqs, seq.rank, key=_rank)
        return index < len(self._seqs) and self._seqs[index] is seq

    def add(self, seq: Seq) -> None:
        """Put `seq` at its place."""
        insort(self._seqs, seq, key=_rank)

    def remove(self, seq: Seq) -> None:
        """Take `seq` out; it must be in."""
        del self._seqs[bisect_left(self._seqs, seq.rank, key=_rank)]


class WaitingQueue:
    """Everybody who waits: those who are ready to be admitted, and those parked until a block is computed.

    Parked sequences cost a step nothing: they are looked at again when their key is woken, not before.

    Attributes:
        ready: may be admitted as soon as there is room.
    """

    __slots__ = ("_by_key", "_parked", "_reasons", "ready")

    def __init__(self) -> None:
        self.ready = SeqList()
        self._parked = SeqList()
        self._reasons: dict[str, tuple[bytes, Stall]] = {}
        self._by_key: dict[bytes, list[Seq]] = {}

    def __len__(self) -> int:
        return len(self.ready) + len(self._parked)

    def __contains__(self, seq: Seq) -> bool:
        return seq in self.ready or seq in self._parked

    @property
    def awaited(self) -> frozenset[bytes]:
        """Keys that somebody is parked for."""
        return frozenset(self._by_key)

    def park(self, seq: Seq, key: bytes, stall: Stall) -> None:
        """Set a ready sequence aside until `wake(key)`; `stall` says why."""
        self.ready.remove(seq)
        self._parked.add(seq)
        self._reasons[seq.id] = (key, stall)
        self._by_key.setdefault(key, []).append(seq)

    def wake(self, key: bytes) -> None:
        """Make ready whoever is parked for `key`."""
        for seq in self._by_key.pop(key, ()):
            del self._reasons[seq.id]
            self._parked.remove(seq)
            self.ready.add(seq)

    def remove(self, seq: Seq) -> None:
        """Take a sequence out, ready or parked."""
        if seq.id not in self._reasons:
            self.ready.remove(seq)
            return
        key, _ = self._reasons.pop(seq.id)
        self._parked.remove(seq)
        self._by_key[key].remove(seq)
        if not self._by_key[key]:
            del self._by_key[key]

    def parked_head(self) -> Stall | None:
        """Why the head of the whole queue waits, if it is a parked one."""
        if not len(self._parked):
            return None
        head = self._parked[0]
        if len(self.ready) and self.ready[0].rank < head.rank:
            return None
        return self._reasons[head.id][1]
