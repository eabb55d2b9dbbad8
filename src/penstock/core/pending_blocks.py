"""Which running sequence will compute which block, so that no block is computed twice.

Every full block of a running sequence's known tokens that is not computed yet is pending. A waiting sequence that needs
such a block next waits until it is settled: sealed, or given up because its maker leaves. Decides nothing else.
Invariant: the maker of a pending block runs, so no sequence waits for a block for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.sequence import Seq

__all__ = ["PendingBlocks"]


class PendingBlocks:
    """Block key -> the running sequence that will compute it. Owned by the scheduler.

    Attributes:
        makers: of all pending blocks.
    """

    __slots__ = ("makers",)

    def __init__(self) -> None:
        self.makers: dict[bytes, Seq] = {}

    def run_length(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, are pending without a gap."""
        count = 0
        for key in keys:
            if key not in self.makers:
                break
            count += 1
        return count

    def make(self, seq: Seq, keys: Iterable[bytes]) -> None:
        """`seq` will compute these blocks, except those that another sequence is computing already."""
        for key in keys:
            self.makers.setdefault(key, seq)

    def settle(self, seq: Seq, keys: Iterable[bytes]) -> None:
        """`seq` has computed these blocks, or never will."""
        for key in keys:
            if self.makers.get(key) is seq:
                del self.makers[key]
