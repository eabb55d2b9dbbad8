"""Who is about to compute which block, so that nobody computes it twice.

A running sequence promises every full block of its known tokens that is not computed yet. A waiting sequence that needs
such a block parks until the promise is settled: kept, when the block is sealed, or withdrawn, when the sequence leaves.
Decides nothing else. Invariant: whoever has a promise runs, so every promise is settled in the end and nobody who waits
for one waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.policy import WaitingQueue
from penstock.core.sequence import Seq

__all__ = ["Promises"]


class Promises:
    """Block key -> the running sequence that will compute it. Owned by the scheduler; wakes its queue."""

    __slots__ = ("_makers", "_waiting")

    def __init__(self, waiting: WaitingQueue) -> None:
        self._makers: dict[bytes, Seq] = {}
        self._waiting = waiting

    @property
    def makers(self) -> dict[bytes, Seq]:
        """All open promises."""
        return self._makers

    def run_length(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, are promised without a gap."""
        count = 0
        for key in keys:
            if key not in self._makers:
                break
            count += 1
        return count

    def make(self, seq: Seq, keys: Sequence[bytes]) -> None:
        """`seq` will compute these blocks. Where another has promised one already, that promise stands."""
        for key in keys:
            self._makers.setdefault(key, seq)

    def settle(self, seq: Seq, keys: Sequence[bytes]) -> None:
        """`seq` has computed these blocks, or never will: whoever waits for one of them looks again."""
        for key in keys:
            if self._makers.get(key) is seq:
                del self._makers[key]
                self._waiting.wake(key)
