"""The port to blocks that outlived a process, of whoever wants to know what is there; a runner reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["StoredBlocks"]


class StoredBlocks(Protocol):
    """Knows which blocks are in files. Called by the engine's thread between two steps."""

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, are there now. They may be gone, or damaged, when they are read."""
        ...
