"""Finds how much of a prompt is stored, for models with recurrent state, which need stored states besides blocks.

Implements the port `StoredBlocks` by looking for files.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.store.block_store import BlockStore

__all__ = ["StatefulPrefixes"]


class StatefulPrefixes:
    """Blocks, and recurrent states under the keys of the blocks that they follow. Thread-safe."""

    def __init__(self, blocks: BlockStore, states: BlockStore) -> None:
        self._blocks = blocks
        self._states = states

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many leading `keys` have a block, up to the last one that has a state too."""
        wanted = tuple(keys)
        count = self._blocks.leading(wanted)
        while count and not self._states.has(wanted[count - 1]):
            count -= 1
        return count
