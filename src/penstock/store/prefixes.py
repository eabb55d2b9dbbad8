"""How much of a prompt is stored where blocks alone do not suffice: a model that carries state needs that too.

Implements the port `StoredBlocks`. Decides nothing: it looks for files.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.store.block_store import BlockStore

__all__ = ["StatefulPrefixes"]


class StatefulPrefixes:
    """Blocks, and recurrent states under the keys of the blocks that they follow. For any thread."""

    def __init__(self, blocks: BlockStore, states: BlockStore) -> None:
        self._blocks = blocks
        self._states = states

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of `keys`, from the first on, have a file, up to the last behind which there is a state."""
        wanted = tuple(keys)
        count = self._blocks.leading(wanted)
        while count and not self._states.has(wanted[count - 1]):
            count -= 1
        return count
