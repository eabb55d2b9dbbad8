"""Which replicas were sent which prefixes: a bounded index of block keys.

A key names a block and all blocks before it, so one lookup tells which replicas were sent a whole prefix. Not every
length is indexed: all lengths up to 32 blocks, then multiples of a power of two, 16 to 32 between a length and its
double. So a prompt of any length costs at most a few hundred lookups, and a prefix is found to within a sixteenth of
its length.

The index does not know what a replica has since dropped from its cache: it says where a prefix was. The least recently
used keys are forgotten first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from penstock.routing.load import Replica

__all__ = ["Holders"]


def _stride(length: int) -> int:
    return 1 << max(0, length.bit_length() - 5)


_LENGTHS = tuple(length for octave in range(21) for length in range(1 << octave, 2 << octave, _stride(1 << octave)))
"""The indexed numbers of leading blocks, up to two million."""


class Holders:
    """Maps the key of a prefix's last block to the replicas that were sent the prefix. Owned by its `Router`.

    Args:
        most_holders: the most replicas kept for each key; the newest push out the oldest.
    """

    __slots__ = ("_by_key", "_most_holders")

    def __init__(self, most_holders: int) -> None:
        self._most_holders = most_holders
        self._by_key: OrderedDict[bytes, tuple[Replica, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def lengths(self, keys: Sequence[bytes], enough: int, draw: Random) -> dict[Replica, int]:
        """Replicas that hold a prefix of `keys` -> its length in blocks; the longest first, about `enough` replicas.

        If more than `enough` hold the same prefix, some of them are drawn at random.
        """
        found: dict[Replica, int] = {}
        for length in reversed(_LENGTHS[: bisect_right(_LENGTHS, len(keys))]):
            holders: Sequence[Replica] = self._by_key.get(keys[length - 1], ())
            if len(holders) > enough:
                holders = draw.sample(holders, enough)
            for replica in holders:
                if replica.alive and replica not in found:
                    found[replica] = length
            if len(found) >= enough:
                break
        return found

    def held(self, replica: Replica, keys: Sequence[bytes]) -> int:
        """How many leading blocks of `keys` this replica holds."""
        for length in reversed(_LENGTHS[: bisect_right(_LENGTHS, len(keys))]):
            if replica in self._by_key.get(keys[length - 1], ()):
                return length
        return 0

    def add(self, replica: Replica, keys: Sequence[bytes]) -> None:
        """Note that `replica` was sent a prompt with these keys. Short prefixes stay longest, since they are shared."""
        by_key = self._by_key
        for length in reversed(_LENGTHS[: bisect_right(_LENGTHS, len(keys))]):
            key = keys[length - 1]
            known = by_key.get(key, ())
            if replica not in known:
                by_key[key] = (replica, *(each for each in known[: self._most_holders - 1] if each.alive))
            by_key.move_to_end(key)

    def keep(self, most: int) -> None:
        """Forget all but the `most` most recently used keys."""
        while len(self._by_key) > most:
            self._by_key.popitem(last=False)
