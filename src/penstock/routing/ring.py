"""A stable order of replicas for every key: a replica that joins or leaves changes few of the orders.

Consistent hashing (Karger et al. 1997): each replica has many points on a circle, and a key prefers the replicas whose
points follow it. Among n replicas, one that joins takes about 1/n of first places, and one that leaves gives up only
its own. All routers of a fleet agree without communicating.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable

from penstock.routing.load import Replica

__all__ = ["Ring"]

_POINTS = 64
_A_DIGEST = 8
"""Points that one digest of 64 bytes gives."""


class Ring:
    """Replicas on a circle of 2**64 places."""

    __slots__ = ("_owners", "_places")

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        points = sorted(((place, each.name, each) for each in replicas for place in _places(each.name)), key=_place)
        self._places = [point[0] for point in points]
        self._owners = [point[2] for point in points]

    def after(self, key: bytes, count: int, able: Collection[Replica] | None = None) -> list[Replica]:
        """The `count` replicas in `able` (None: all) that `key` prefers, in this order; fewer if `able` has fewer."""
        found: dict[Replica, None] = {}
        size = len(self._owners)
        start = bisect_left(self._places, _hash(key))
        for step in range(size):
            owner = self._owners[(start + step) % size]
            if able is None or owner in able:
                found[owner] = None
                if len(found) >= count:
                    break
        return list(found)


def _place(point: tuple[int, str, Replica]) -> tuple[int, str]:
    return point[:2]


def _places(name: str) -> list[int]:
    encoded = name.encode("utf-8", "surrogatepass")
    places: list[int] = []
    for number in range(_POINTS // _A_DIGEST):
        digest = hashlib.blake2b(
            encoded, digest_size=64, salt=struct.pack("<Q", number), person=b"penstock ring"
        ).digest()
        places += struct.unpack(f"<{_A_DIGEST}Q", digest)
    return places


def _hash(key: bytes) -> int:
    """Place of a key. Real keys are hashes, but tests use any bytes, so each key is hashed once more."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"penstock ring").digest(), "little")
