"""Who is about to compute which block, so that nobody computes it twice.

A running sequence promises every full block of its known tokens that is not computed yet. A waiting sequence that needs
such a block next waits until the promise is settled: kept, when the block is sealed, or withdrawn, when the sequence
leaves. Decides nothing else. Invariant: whoever has a promise runs, so nobody waits for a promise for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.sequence import Seq

__all__ = ["Promises"]


class Promises:
    """Block key -> the running sequence that will compute it. Owned by the scheduler.

    Attributes:
        makers: all open promises.
    """

    __slots__ = ("makers",)

    def __init__(self) -> None:
        self.makers: dict[bytes, Seq] = {}

    def run_length(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, are promised without a gap."""
        count = 0
        for key in keys:
            if key not in self.makers:
                break
            count += 1
        return count

    def make(self, seq: Seq, keys: Iterable[bytes]) -> None:
        """`seq` will compute these blocks. Where another has promised one already, that promise stands."""
        for key in keys:
            self.makers.setdefault(key, seq)

    def settle(self, seq: Seq, keys: Iterable[bytes]) -> None:
        """`seq` has computed these blocks, or never will."""
        for key in keys:
            if self.makers.get(key) is seq:
                del self.makers[key]
