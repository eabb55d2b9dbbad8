"""From the queue to a slot, blocks and a first row.

Decides whether a waiting sequence fits. It needs a slot, token budget and blocks, and no running sequence may be
computing its prefix. The queue says whose turn it is. Invariant: an admission leaves one block for each running
sequence that may outgrow its lease; otherwise the newcomer would be preempted a few steps later and its work lost.
"""

from __future__ import annotations

import heapq

from penstock.contract.plan import Stall, StallReason
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool, Lease
from penstock.core.pending_blocks import PendingBlocks
from penstock.core.policy import SeqList
from penstock.core.restoring import Restoring
from penstock.core.sequence import Seq
from penstock.core.state_keeping import StateKeeping
from penstock.core.steps import PlanBuilder
from penstock.core.waiting import WaitingQueue

__all__ = ["Admitter"]


class Admitter:
    """Admits waiting sequences. Owned by the scheduler, whose queue, running sequences and free slots it changes.

    Args:
        states: keeps recurrent state, for a model that carries any; else None.
        restoring: restores stored blocks, if blocks are stored; else None.
        free_slots: a heap.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        states: StateKeeping | None,
        waiting: WaitingQueue,
        running: SeqList,
        pending_blocks: PendingBlocks,
        free_slots: list[int],
        restoring: Restoring | None = None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._states = states
        self._waiting = waiting
        self._running = running
        self._pending_blocks = pending_blocks
        self._free_slots = free_slots
        self._restoring = restoring

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    def spare(self) -> int:
        """Blocks that an admission leaves for running sequences."""
        return sum(self._may_grow(seq) for seq in self._running)

    def lacking(self, seq: Seq) -> int:
        """How many blocks are missing to admit `seq`; 0 or less if there are enough."""
        keys = () if seq.request.fresh_prompt else seq.chain.keys
        quote = self._pool.quote(keys, len(seq.tokens))
        return quote.need + self.spare() - quote.have

    def admit_in_order(self, builder: PlanBuilder) -> Stall | None:
        """Admit from the queue while there is room. Returns why the head of the queue, if any, was not admitted.

        Smaller sequences may pass a head that lacks blocks, `max_bypasses` times in all; then all others wait for it.
        A sequence that waits for a shared prefix may be passed freely: its blocks come with the next commit.
        """
        lacking = 0
        head: Seq | None = None  # the first that lacks blocks
        first_stall: Stall | None = None
        spare = self.spare()
        for seq in self._waiting.in_order():
            if head is not None and head.bypasses + lacking > self._config.max_bypasses:
                break
            if (stall := self.try_admit(seq, builder, spare)) is None:
                spare += self._may_grow(seq)
                if head is not None:
                    head.bypasses += 1
                continue
            first_stall = first_stall or stall
            if stall.reason in (StallReason.NO_SLOT, StallReason.NO_BUDGET):
                break
            if stall.reason is StallReason.NO_BLOCKS:
                head = head or seq
                lacking += 1
        return first_stall

    def try_admit(self, seq: Seq, builder: PlanBuilder, spare: int) -> Stall | None:
        """Give `seq` a slot, blocks and a row; or return what it waits for and change nothing.

        `spare` blocks are still available afterwards.
        """
        if not self._free_slots:
            return Stall(seq.id, StallReason.NO_SLOT, need=1, have=0)
        if (stall := self.held_up(seq, builder)) is not None:
            return stall
        keys, known = () if seq.request.fresh_prompt else seq.chain.keys, len(seq.tokens)
        present = 0 if self._states is None else self._pool.present(keys, known)
        lease = self._pool.acquire(keys, known, spare)
        if lease is None:
            quote = self._pool.quote(keys, known)
            return Stall(seq.id, StallReason.NO_BLOCKS, need=quote.need + spare, have=quote.have)
        if self._states is not None:
            self._states.begin(seq, lease.cached, present)
        self._admit(seq, lease, builder)
        return None

    def held_up(self, seq: Seq, builder: PlanBuilder) -> Stall | None:
        """What `seq` waits for when a slot and blocks are free: token budget, or a prefix that is being computed."""
        keys, known = () if seq.request.fresh_prompt else seq.chain.keys, len(seq.tokens)
        least = known if self._config.looks_ahead else 1
        budget = builder.prompt_budget
        if budget < least:
            return Stall(seq.id, StallReason.NO_BUDGET, need=least, have=budget)
        if self._pending_blocks.makers:
            stateless = self._states is None
            cached = self._pool.quote(keys, known).cached if stateless else self._pool.present(keys, known)
            shared = self._pending_blocks.run_length(keys[cached : (known - 1) // self._config.block_size])
            if shared:
                if self._states is not None:
                    self._states.branch_at(self._pending_blocks, keys[: cached + shared])
                return Stall(seq.id, StallReason.SHARED_PREFIX, need=cached + shared, have=cached)
        return None

    def _admit(self, seq: Seq, lease: Lease, builder: PlanBuilder) -> None:
        self._waiting.remove(seq)
        seq.admit(lease, heapq.heappop(self._free_slots), lease.cached * self._config.block_size)
        self._running.add(seq)
        if self._restoring is not None:
            self._restoring.begin(seq)
        self._waiting.charge_admission(seq)
        self._pending_blocks.make(seq, seq.chain.keys[lease.cached :])
        builder.admit(seq, lease)

    def _may_grow(self, seq: Seq) -> bool:
        """Whether a running sequence may outgrow its lease."""
        return len(seq.lease.blocks) < self._pool.blocks_for(seq.limit - 1)  # the last token is never computed
