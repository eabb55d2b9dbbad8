"""What enters and leaves the prefix cache, as values, and the port through which an engine passes them on.

A block is named by its key (`core.block_keys`). Whoever applies all events of an engine in order, beginning with an
empty set, holds exactly the keys that its prefix cache can find in memory. Blocks in files are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["BlocksRemoved", "BlocksStored", "CacheCleared", "CacheEvent", "CacheEvents", "EventCounts"]


class BlocksStored(NamedTuple):
    """Blocks of one sequence, each following the one before, can be found from now on and could not before.

    Attributes:
        keys: of the blocks, in order of position.
        parent: the key of the block before the first of them; None if that begins its sequence.
        tokens: of all these blocks, in order.
        salt: the `cache_salt` of the sequence.
        adapter: the name of its adapter; "" for none.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str = ""
    adapter: str = ""


class BlocksRemoved(NamedTuple):
    """Blocks with these keys cannot be found any more: others needed their memory."""

    keys: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """Nothing can be found any more."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class EventCounts(NamedTuple):
    """What became of the batches of events.

    Attributes:
        published: taken to be sent.
        dropped: left out, because too many waited to be sent.
    """

    published: int = 0
    dropped: int = 0


class CacheEvents(Protocol):
    """Tells others what an engine's prefix cache holds. Called by the engine's thread between two steps."""

    @property
    def counts(self) -> EventCounts:
        """Batches since the start."""
        ...

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Pass on a batch: at least one event, in order. Never waits, and never raises."""
        ...
