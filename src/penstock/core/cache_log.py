"""What entered and left the prefix cache, in order, kept until it is taken.

The pool notes the keys that leave, and the scheduler the blocks that enter, since it knows their tokens. Decides
nothing. Invariant: all events ever taken, applied in order to an empty set, give the keys of the pool's index.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from penstock.core.block_keys import KeyChain

__all__ = ["CacheLog"]


class CacheLog:
    """The events since the last `take`. Owned by the scheduler; its pool adds to it."""

    __slots__ = ("_events", "_removed")

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._removed: list[bytes] = []  # after all of `_events`

    def stored(
        self, chain: KeyChain, indices: Sequence[int], tokens: Sequence[int], salt: str, adapter: str = ""
    ) -> None:
        """Blocks of a sequence can be found from now on; each run without a gap becomes one event.

        Args:
            chain: the sequence's keys.
            indices: places of the blocks in the chain, ascending.
            tokens: the whole sequence so far.
            salt: the sequence's salt.
            adapter: the name of its adapter.
        """
        self._end_removals()
        start = 0
        for at in range(1, len(indices) + 1):
            if at == len(indices) or indices[at] != indices[at - 1] + 1:
                self._events.append(_run(chain, indices[start], indices[at - 1] + 1, tokens, salt, adapter))
                start = at

    def removed(self, key: bytes) -> None:
        """The block with this key can no longer be found."""
        self._removed.append(key)

    def cleared(self) -> None:
        """No block can be found any more."""
        self._end_removals()
        self._events.append(CacheCleared())

    def take(self) -> tuple[CacheEvent, ...]:
        """The events since the last call."""
        self._end_removals()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(BlocksRemoved(tuple(self._removed)))
            self._removed.clear()


def _run(chain: KeyChain, start: int, end: int, tokens: Sequence[int], salt: str, adapter: str) -> BlocksStored:
    """The event for blocks `[start, end)` of a sequence."""
    size, parent = chain.block_size, chain.keys[start - 1] if start else None
    return BlocksStored(tuple(chain.keys[start:end]), parent, tuple(tokens[start * size : end * size]), salt, adapter)
