"""The engine's port to the block store: which blocks are stored. The runner reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["StoredBlocks"]


class StoredBlocks(Protocol):
    """Looks up stored blocks. Called by the engine's thread between two steps."""

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, are stored now. They may be gone or damaged by the time of reading."""
        ...
