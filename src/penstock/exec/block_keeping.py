"""Saves KV blocks and recurrent states, and loads saved ones back into memory, as plans say.

Decides nothing: the plan names the blocks, the store knows files and checksums. Invariants: everything is checked
before it is loaded; a block that a plan hands out again is no longer being saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract.plan import Row, RowResult, StepPlan, StoreCounts
from penstock.exec.kv_store import KVStore
from penstock.exec.state_store import StateStore
from penstock.store import BlockStore, BlockWriter, DiskBudget, Shelf
from penstock.thread_turns import give_way

__all__ = ["BlockKeeping"]

_STATES = 1
"""The writer's shelf for recurrent states; its first shelf is for blocks."""

_LAST_SECONDS = 5.0
"""Time to save what is still waiting when a runner is closed."""


class BlockKeeping:
    """A store beside the KV memory of one runner. Owned by it.

    Args:
        kv: the KV memory.
        store: a store whose blocks have as many bytes as those of `kv`.
        most_bytes: the most bytes that all folders of the store may take together.
        states: the states of a model that carries state; else None.
        kept_states: the store for states, as `store` is for blocks.
    """

    def __init__(
        self,
        kv: KVStore,
        store: BlockStore,
        most_bytes: int,
        states: StateStore | None = None,
        kept_states: BlockStore | None = None,
    ) -> None:
        self._kv = kv
        self._store = store
        self._states = states
        self._kept_states = kept_states
        self._said = StoreCounts()
        shelves = [Shelf(store, kv.copy_block)]
        if states is not None and kept_states is not None:
            shelves.append(Shelf(kept_states, states.copy_checkpoint))
        self._writer = BlockWriter(shelves, DiskBudget(store.folder.path.parent, most_bytes, give_way))

    def begin(self, plan: StepPlan) -> None:
        """Start saving what a plan wants saved, and note the blocks that it hands out. Call before computing rows."""
        self._writer.step_begins()
        if plan.saves:
            self._writer.offer(plan.saves)
        if plan.state_saves:
            self._writer.offer(plan.state_saves, _STATES)
        size = self._kv.block_size
        for admit in plan.admits:
            self._writer.take_back(admit.blocks[admit.computed // size :])
        for row in plan.rows:
            if row.new_blocks:
                self._writer.take_back(row.new_blocks)
            if row.checkpoints:
                self._writer.take_back([kept.slot for kept in row.checkpoints], _STATES)

    def restore(self, row: Row, blocks: Sequence[int]) -> RowResult | None:
        """Read the blocks of a row into `blocks`, and the state after them if the model carries state.

        Returns the result of a row that fell short if one is missing or damaged, else None.
        """
        states = self._states
        if states is not None:
            states.begin_reading(row.slot)
        for count, (key, block) in enumerate(zip(row.stored, blocks, strict=True)):
            content = self._store.read(key)
            if content is None:
                return RowResult(row.slot, restored=count if states is None else 0)
            self._kv.fill_block(block, content)
        if row.state:
            assert states is not None, "a state is read, and none is carried"
            assert self._kept_states is not None, "a state is read, and none is kept"
            content = self._kept_states.read(row.state)
            if content is None:
                return RowResult(row.slot)
            states.fill(row, content)
        return None

    def end(self) -> StoreCounts | None:
        """The plan has been computed. Returns the progress of saving if it changed since the last call."""
        self._writer.step_ends()
        counts = self._writer.counts
        if counts == self._said:
            return None
        self._said = counts
        return counts

    def settle(self, seconds: float) -> bool:
        """Wait until everything is written, at most this long. Returns whether it is."""
        return self._writer.settle(seconds)

    def close(self) -> None:
        """Save what is waiting, for at most some seconds, and stop."""
        self._writer.hurry()
        self._writer.settle(_LAST_SECONDS)
        self._writer.close()
