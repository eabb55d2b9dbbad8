"""Makes room for a tenant that holds few slots: stops sequences of another tenant that holds many.

The queue says which tenant may take from which (`core.slot_shares`); this decides whether a claim gets its slot and
blocks in this plan, and which sequences are stopped for it. If the step would be long, tenants above their share have
no row in it: the newcomer has already waited for the step before. Invariants: a sequence is stopped only if the one
that claims its place is then admitted; no tenant is left out of more than `IN_A_ROW` plans in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.admitter import Admitter
from penstock.core.block_pool import BlockPool
from penstock.core.chunk_limit import ChunkLimit
from penstock.core.in_flight import InFlight
from penstock.core.policy import SeqList
from penstock.core.sequence import Seq
from penstock.core.steps import PlanBuilder
from penstock.core.waiting import WaitingQueue

__all__ = ["IN_A_ROW", "SlotClaims"]

IN_A_ROW = 4
"""Plans in a row that may leave a tenant out. Newcomers seldom come fewer than this many steps apart."""


class SlotClaims:
    """Admits waiting sequences at the cost of running ones. Owned by the scheduler.

    Without a prefix cache no sequence is stopped, since it would recompute everything.

    Args:
        in_flight: a sequence with a row in it cannot be stopped yet.
        preempt: sends a running sequence back to the queue.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        waiting: WaitingQueue,
        running: SeqList,
        in_flight: InFlight,
        admitter: Admitter,
        preempt: Callable[[Seq], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._waiting = waiting
        self._running = running
        self._in_flight = in_flight
        self._admitter = admitter
        self._preempt = preempt
        self._last_apart = -1  # the last step that left a tenant out
        self._in_a_row = 0  # how many steps in a row did, up to that one

    def would_take(self, request: SequenceRequest) -> bool:
        """Whether `request`, if it were submitted now, would take a slot rather than wait until a sequence ends."""
        first = not self._waiting.part_of(request.tenant).sequences
        return first and self._config.prefix_caching and bool(self._waiting.givers(request))

    def admit(self, builder: PlanBuilder) -> Seq | None:
        """Admit sequences that may take a slot or blocks. Call before prompts of others are read.

        A plan admits at most one sequence of each tenant. A head that lacks blocks may be passed as usual.

        Returns:
            The sequence that should have no row in this plan: it is in flight and will be stopped in the next. Or None.
        """
        resting: Seq | None = None
        passed: list[Seq] = []  # heads that lack blocks
        for seq in self._waiting.heads()[: self._config.max_num_seqs]:
            if any(each.bypasses >= self._config.max_bypasses for each in passed):
                break
            givers = self._waiting.givers(seq.request)
            builder.reserved = [each.remaining for each in self._running].count(1)
            if givers and self._admitter.held_up(seq, builder) is None:
                stoppable = [each for each in givers if not self._in_flight.uses(each)]
                if self._take(seq, stoppable, builder):
                    for each in passed:
                        each.bypasses += 1
                    continue
                if not stoppable and not self._admitter.has_slot:
                    resting = resting or givers[0]
            if self._admitter.lacking(seq) > 0:
                passed.append(seq)
        builder.reserved = 0
        return resting

    def _take(self, seq: Seq, stoppable: Sequence[Seq], builder: PlanBuilder) -> bool:
        """Admit `seq` and stop as many of `stoppable` as it needs; False if all together are too few."""
        stopped = self._to_stop(seq, stoppable)
        if stopped is None:
            return False
        if not builder.rows and builder.limit is not None:
            self._leave_out(seq, builder, builder.limit)
        for each in stopped:
            self._preempt(each)
        return self._admitter.try_admit(seq, builder, self._admitter.spare()) is None

    def _leave_out(self, seq: Seq, builder: PlanBuilder, limit: ChunkLimit) -> None:
        """Leave tenants above their share out if the step would be long, for at most `IN_A_ROW` plans in a row."""
        prompts = len(self._waiting) > 1 or any(each.remaining > 1 for each in self._running)
        follows = self._last_apart == builder.step - 1
        if not (prompts or limit.crowded) or (follows and self._in_a_row == IN_A_ROW):
            return
        builder.left_out = self._waiting.crowding(seq.request)
        if not builder.left_out:
            return
        limit.leave_out(builder.left_out)
        self._in_a_row = self._in_a_row + 1 if follows else 1
        self._last_apart = builder.step

    def _to_stop(self, seq: Seq, stoppable: Sequence[Seq]) -> list[Seq] | None:
        """Which of `stoppable` must be stopped so that `seq` gets a slot and blocks; None if even all are too few."""
        lacking, stopped, own = self._admitter.lacking(seq), 0, set(seq.chain.keys)
        while lacking > 0 or not (self._admitter.has_slot or stopped):
            if stopped == len(stoppable) or not self._config.prefix_caching:
                return None
            lacking -= self._pool.freed_by(stoppable[stopped].lease, own)
            stopped += 1
        return list(stoppable[:stopped])
