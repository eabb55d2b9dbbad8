"""A plan while it is being made.

Decides nothing; the scheduler does. Invariant: rows, sequences and leases of one plan stand in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.contract.plan import Admit, Checkpoint, Row, Save, Stall, StepPlan
from penstock.core.block_pool import Lease
from penstock.core.chunk_limit import ChunkLimit
from penstock.core.in_flight import InFlightStep
from penstock.core.sequence import Seq

__all__ = ["PlanBuilder"]


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: the remaining token budget, and what was decided so far. Owned by `Scheduler.plan`.

    Attributes:
        limit: the limit on the time that prompts take; None for no limit.
        reserved: part of the budget kept for decoding sequences that have no row yet.
        left_out: tenants whose running sequences have no row in it.
        restores: blocks that may still be read from the store.
        stateful: whether the model carries recurrent state, which is read after the last block of a sequence.
        seqs: the sequence of each row.
        leases: the lease of each row.
    """

    step: int
    budget: int
    limit: ChunkLimit | None = None
    reserved: int = 0
    left_out: frozenset[str] = frozenset()
    restores: int = 0
    stateful: bool = False
    rows: list[Row] = field(default_factory=list)
    seqs: list[Seq] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)

    @property
    def prompt_budget(self) -> int:
        """What is left of the token budget for prompts that have no row yet."""
        return 0 if self.limit is not None and self.limit.spent else self.budget - self.reserved

    @property
    def draft_budget(self) -> int:
        """What is left of the token budget for drafts: nothing where a prompt could have used the time."""
        return 0 if self.limit is not None and self.limit.cut else self.budget

    def takes(self, seq: Seq) -> bool:
        """Whether a running sequence may have a row: it has none yet, and its tenant is not left out."""
        return seq.last_step != self.step and seq.request.tenant not in self.left_out

    def room(self, start: int, remaining: int, reserved: int = 0) -> int:
        """How many of `remaining` positions from `start` on a row may compute; `reserved` of the budget is kept."""
        count = min(remaining, self.budget - reserved)
        if self.limit is None or remaining == 1 or count < 1:
            return count
        return self.limit.fit(start, count)

    def admit(self, seq: Seq, lease: Lease) -> None:
        """Admit `seq` and give it its first row from the remaining budget."""
        request = seq.request
        self.admits.append(
            Admit(
                slot=seq.slot,
                seq_id=seq.id,
                tokens=tuple(seq.tokens),
                blocks=tuple(lease.blocks),
                computed=seq.computed,
                sampling=request.sampling,
                choice=request.choice,
                prompt_tokens=len(request.prompt),
                max_new_tokens=seq.limit - len(request.prompt),
                grammar=request.grammar,
                embedding=request.embedding,
                thinking=request.thinking,
                checkpoint=lease.checkpoint,
                adapter=request.adapter,
            )
        )
        if seq.restore_end:
            self.restore(seq, lease)
            return
        remaining = seq.remaining
        self.add(seq, lease, remaining, self.room(seq.scheduled, remaining, self.reserved))

    def restore(self, seq: Seq, lease: Lease) -> None:
        """A row that reads stored blocks of `seq`: as many as the step may, and at least one."""
        keys, size = seq.chain.keys, seq.chain.block_size
        first, end = seq.scheduled // size, seq.restore_end // size
        wanted = keys[first : min(end, first + max(1, self.restores))]
        self.restores -= len(wanted)
        count = len(wanted) * size
        state = wanted[-1] if self.stateful and first + len(wanted) == end else b""
        self.rows.append(Row(seq.slot, seq.scheduled, count, (), sample=False, stored=tuple(wanted), state=state))
        self.seqs.append(seq)
        self.leases.append(lease)
        seq.schedule(self.step, count, draws=False)

    def add(self, seq: Seq, lease: Lease, remaining: int, count: int, new_blocks: tuple[int, ...] = ()) -> None:
        """A row of `count` of the `remaining` positions of `seq`, which holds `lease`."""
        sample = count == remaining and seq.request.embedding is None
        self.rows.append(Row(seq.slot, seq.scheduled, count, new_blocks, sample))
        self.seqs.append(seq)
        self.leases.append(lease)
        self.budget -= count
        if self.limit is not None and remaining > 1:
            self.limit.take(seq.scheduled, count)
        seq.schedule(self.step, count, sample)

    def add_drafts(
        self, index: int, tokens: tuple[int, ...], new_blocks: tuple[int, ...], spares: tuple[int, ...] = ()
    ) -> None:
        """Add drafts to row number `index`; if the model carries state, with a spare place for each."""
        row, count = self.rows[index], len(tokens)
        blocks = row.new_blocks + new_blocks
        self.rows[index] = replace(row, count=row.count + count, new_blocks=blocks, drafts=tokens, spares=spares)
        self.budget -= count
        self.seqs[index].add_drafts(count)

    def order_guesses(self, index: int, follow: int, guesses: int, new_blocks: tuple[int, ...]) -> None:
        """Let the draft model catch up with row number `index`, and guess what comes after it."""
        row = self.rows[index]
        blocks = row.new_blocks + new_blocks
        self.rows[index] = replace(row, follow=follow, guesses=guesses, new_blocks=blocks)

    def resume(self, index: int, spare: int) -> None:
        """Let row number `index` continue from the state in a spare place."""
        self.rows[index] = replace(self.rows[index], resume=spare)

    def add_checkpoints(self, index: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Let row number `index` keep its recurrent state at these checkpoints."""
        self.rows[index] = replace(self.rows[index], checkpoints=checkpoints)

    def build(
        self,
        releases: tuple[int, ...],
        stall: Stall | None,
        waiting: int,
        saves: tuple[Save, ...] = (),
        state_saves: tuple[Save, ...] = (),
    ) -> InFlightStep:
        """The plan, with the sequence and lease of each row."""
        stalls = () if stall is None else (stall,)
        rows = tuple(self.rows)
        plan = StepPlan(self.step, releases, tuple(self.admits), rows, stalls, waiting, saves, state_saves)
        return InFlightStep(plan, tuple(self.seqs), tuple(self.leases))
