"""When a row keeps its recurrent state, when a kept state may be found, and from which state a row continues.

Decides at which block boundaries a row keeps its state: where another sequence may want to continue. Knows plans and
sequences; `Checkpoints` decides which slot is forgotten for it, `SpareStates` where the states before drafts lie.
Invariant: a state is findable only once the plan that wrote it was committed, for a sequence that still ran and did not
fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract.plan import Checkpoint, Row, RowResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool
from penstock.core.checkpoints import NO_CHECKPOINT, Checkpoints
from penstock.core.in_flight import InFlightStep
from penstock.core.pending_blocks import PendingBlocks
from penstock.core.restoring import Restoring
from penstock.core.sequence import Seq
from penstock.core.spare_states import NO_SPARE, SpareStates
from penstock.core.steps import PlanBuilder

__all__ = ["StateKeeping"]


class StateKeeping:
    """What the scheduler does beyond KV for a model that carries state. Owned by the scheduler.

    Args:
        restoring: saves states beyond the process, if they are saved; else None.

    Attributes:
        spares: the places for the states before drafts.
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, checkpoints: Checkpoints, restoring: Restoring | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._checkpoints = checkpoints
        self._restoring = restoring
        self.spares = SpareStates(config.spare_states)

    def branch_at(self, pending: PendingBlocks, keys: Sequence[bytes]) -> None:
        """Let the sequence that computes the last of the blocks `keys`, for which another waits, keep its state."""
        maker, position = pending.makers[keys[-1]], len(keys) * self._config.block_size
        if position not in maker.branches:
            maker.branches = (*maker.branches, position)

    def begin(self, seq: Seq, cached: int, present: int) -> None:
        """`seq` begins after `cached` blocks. If more were present, it branches off after the last of them."""
        if present > cached:
            seq.branches = (present * self._config.block_size,)

    def assign_states(self, builder: PlanBuilder) -> None:
        """Say from which state each row of a plan continues, and which states it keeps. All drafts are in the plan."""
        for index, (row, seq) in enumerate(zip(builder.rows, builder.seqs, strict=True)):
            if seq.resume != NO_SPARE:
                builder.resume(index, seq.resume)
                self._forget_spare(seq)
            kept = [
                Checkpoint(position, slot)
                for position in self._wanted(row, seq)
                if (slot := self._take(seq, position)) != NO_CHECKPOINT
            ]
            if kept:
                builder.add_checkpoints(index, tuple(kept))
        self._checkpoints.unpin()

    def commit(self, step: InFlightStep, results: Sequence[RowResult | None]) -> None:
        """Let the states that a step kept be found, if their sequences still run and did not fail.

        Call before drawn tokens are appended. If a row waits, the next row, which ends at the same position, keeps its
        state. A row that reads stored blocks keeps the state that it read if it read all of them. A sequence with a
        wrong draft continues from the state before it.
        """
        for row, seq, lease, result in zip(step.plan.rows, step.seqs, step.leases, results, strict=True):
            if not row.checkpoints and not row.spares:
                continue
            sound = seq.holds(lease) and not (result is not None and (result.failure or row.stored))
            waits, right = (False, ()) if result is None else (result.waits, result.right)
            if row.spares:
                if sound and len(right) < len(row.spares):
                    seq.resume = row.spares[len(right)]
                self.spares.settle(row.spares, seq.resume if sound else NO_SPARE)
            if row.checkpoints:
                computed = row.start + row.count - len(row.drafts) - waits + len(right) if sound else 0
                self._settle_checkpoints(seq, row.checkpoints, computed, [token.id for token in right])

    def leave(self, seq: Seq) -> None:
        """`seq` stops running: let the newest state among its generated tokens, if any, be saved.

        Not earlier: a new one follows every few tokens, and a next turn continues only the last.
        """
        if seq.resume != NO_SPARE:
            self._forget_spare(seq)
        if seq.newest_state and seq.newest_state in self._checkpoints:
            index = seq.chain.keys.index(seq.newest_state)
            if (index + 1) * self._config.block_size <= len(seq.tokens):  # else it ended among right drafts
                self._save(seq, index, seq.tokens)

    def drop(self) -> None:
        """No plan in flight will ever be committed."""
        self._checkpoints.drop_pending()
        self.spares.drop_written()

    @property
    def restored(self) -> int:
        """See `Checkpoints.restored`."""
        return self._checkpoints.restored

    @property
    def pending(self) -> bool:
        """Whether a plan in flight keeps any state."""
        return bool(self._checkpoints.pending or self.spares.written)

    def _settle_checkpoints(self, seq: Seq, kept: Sequence[Checkpoint], computed: int, right: Sequence[int]) -> None:
        """Keep the checkpoints up to `computed` positions, which right drafts may have filled, and give others back."""
        tokens = [*seq.tokens, *right]
        for each in kept:
            if each.position <= computed:
                seq.chain.follow(tokens)
                self._keep(seq, each, tokens)
            else:
                self._checkpoints.give_back(each.slot)

    def _forget_spare(self, seq: Seq) -> None:
        self.spares.give_back(seq.resume)
        seq.resume = NO_SPARE

    def _wanted(self, row: Row, seq: Seq) -> list[int]:
        """The block boundaries that `row` passes or reaches and at which its state is worth keeping.

        Multiples of the interval; branches; and the last boundary of the known tokens, or the last two if tokens fill
        their blocks: the same prompt again continues before its last block, a longer one after it.
        """
        size, interval, end = self._config.block_size, self._config.checkpoint_interval, row.start + row.count
        if row.stored:
            return [end] if row.state else []
        first = row.start // size + 1
        if end // size < first or not self._config.prefix_caching:  # as for most rows of one token
            return []
        known = len(seq.tokens) + seq.drawing - row.sample
        return [
            at
            for at in range(first * size, end + 1, size)
            if at >= known - size or at in seq.branches or (interval and at % interval == 0)
        ]

    def _take(self, seq: Seq, position: int) -> int:
        """A slot for the state of `seq` after `position` positions; -1 if it exists already or no slot is free."""
        keys, number = seq.chain.keys, position // self._config.block_size
        if number <= len(keys) and keys[number - 1] in self._checkpoints:
            self._checkpoints.touch(keys[number - 1])
            return NO_CHECKPOINT
        return self._checkpoints.take()

    def _keep(self, seq: Seq, kept: Checkpoint, tokens: Sequence[int]) -> None:
        """Let a state be found. The next turn continues the newest among generated tokens: older ones may go first."""
        interval, index = self._config.checkpoint_interval, kept.position // self._config.block_size - 1
        key, stays = seq.chain.keys[index], bool(interval and kept.position % interval == 0)
        self._pool.keep_state(seq.lease, key, kept.slot)
        generated = kept.position > len(seq.request.prompt)
        if generated:
            self._checkpoints.demote(seq.newest_state)
            seq.newest_state = b"" if stays else key
        if stays or not generated:
            self._save(seq, index, tokens)

    def _save(self, seq: Seq, index: int, tokens: Sequence[int]) -> None:
        """Let the state after block number `index` be saved beyond the process, if it can be found."""
        slot = self._checkpoints.slot_of(seq.chain.keys[index])
        if self._restoring is not None and slot != NO_CHECKPOINT:
            self._restoring.kept(seq, index, slot, tokens)
