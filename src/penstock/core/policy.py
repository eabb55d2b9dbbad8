"""The order in which sequences are served, and lists that keep it.

Decides order only, never whether a sequence fits. Invariant: no two ranks are equal, so a plan depends on nothing but
its inputs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from penstock.contract.request import SequenceRequest
from penstock.core.sequence import Seq

__all__ = ["RANKINGS", "Rank", "SeqList"]

Rank = tuple[float, ...]
"""Orders sequences; the smallest is served first."""


def _first_come(request: SequenceRequest, order: int) -> Rank:
    return (request.arrival, order)


def _by_priority(request: SequenceRequest, order: int) -> Rank:
    return (request.priority, request.arrival, order)


RANKINGS: dict[str, Callable[[SequenceRequest, int], Rank]] = {
    "fcfs": _first_come,
    "priority": _by_priority,
    "fair": _first_come,
}
"""Policy name -> rank of a request that was the `order`-th to be submitted; the smallest rank is served first, under
`fair` among the sequences of one tenant (`core.fair_shares`)."""


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
