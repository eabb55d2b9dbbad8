"""Which replicas were sent which beginnings of prompts: a bounded index of block keys.

A key names a block and all before it, so one look says who was sent a whole beginning. Not every length is indexed: all
up to 32 blocks, then lengths that are multiples of a power of two, 16 to 32 of them between a length and its double. So
a prompt of any length costs at most some hundred looks, and a beginning is found to within a sixteenth of its length.

What a replica has dropped from its cache since is not known here: the index says where a beginning was, and what was
not used for longest is forgotten first.
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
    """Key of the last block of a beginning -> the replicas that were sent it. Owned by its `Router`.

    Args:
        most_holders: so many replicas are kept a key; the newest push out the oldest.
    """

    __slots__ = ("_by_key", "_most_holders")

    def __init__(self, most_holders: int) -> None:
        self._most_holders = most_holders
        self._by_key: OrderedDict[bytes, tuple[Replica, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def lengths(self, keys: Sequence[bytes], enough: int, draw: Random) -> dict[Replica, int]:
        """Replicas that hold a beginning of `keys` -> how many of its blocks; the longest first, about `enough`.

        Of more that hold the same, some are drawn.
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
        """`replica` was sent a prompt with these keys. The shortest beginnings are forgotten last: they are shared."""
        by_key = self._by_key
        for length in reversed(_LENGTHS[: bisect_right(_LENGTHS, len(keys))]):
            key = keys[length - 1]
            known = by_key.get(key, ())
            if replica not in known:
                by_key[key] = (replica, *(each for each in known[: self._most_holders - 1] if each.alive))
            by_key.move_to_end(key)

    def keep(self, most: int) -> None:
        """Forget all but the `most` keys that were used last."""
        while len(self._by_key) > most:
            self._by_key.popitem(last=False)
