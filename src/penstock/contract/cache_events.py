"""What enters and leaves the prefix cache, as values, and the port through which an engine passes them on.

A block is named by its key (`core.block_keys`). All events of an engine, applied in order to an empty set, give exactly
the keys that its prefix cache can find in memory. Blocks in files are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["BlocksRemoved", "BlocksStored", "CacheCleared", "CacheEvent", "CacheEvents", "EventCounts"]


class BlocksStored(NamedTuple):
    """Consecutive blocks of one sequence can be found from now on, and could not be found before.

    Attributes:
        keys: keys of the blocks, in order of position.
        parent: the key of the block before the first one; None if the first one begins its sequence.
        tokens: the tokens of all these blocks, in order.
        salt: the `cache_salt` of the sequence.
        adapter: the name of its adapter; "" for none.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str = ""
    adapter: str = ""


class BlocksRemoved(NamedTuple):
    """Blocks with these keys can no longer be found: their memory was needed for other blocks."""

    keys: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """No block can be found any more."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class EventCounts(NamedTuple):
    """How many batches of events were published, and how many were dropped.

    Attributes:
        published: batches accepted for sending.
        dropped: batches left out because too many waited to be sent.
    """

    published: int = 0
    dropped: int = 0


class CacheEvents(Protocol):
    """Tells others what an engine's prefix cache holds. Called by the engine's thread between two steps."""

    @property
    def counts(self) -> EventCounts:
        """Count the batches since the start."""
        ...

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Pass on a batch: at least one event, in order. Never waits, and never raises."""
        ...
