"""A plan while it is made, and while it is computed.

Decides nothing: the scheduler does. Invariant: rows, sequences and leases of one plan stand in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.contract.plan import Admit, Row, StepPlan
from penstock.core.block_pool import Lease
from penstock.core.sequence import Seq

__all__ = ["Departed", "InFlightStep", "PlanBuilder"]


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: what is left of the token budget, and what was decided so far. Owned by `Scheduler.plan`.

    Attributes:
        seqs: whose each row is.
        leases: under which lease each row is computed.
    """

    step: int
    budget: int
    rows: list[Row] = field(default_factory=list)
    seqs: list[Seq] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)

    def add(self, seq: Seq, count: int, new_blocks: tuple[int, ...] = ()) -> None:
        """A row of `count` positions for `seq`."""
        sample = count == seq.remaining and seq.request.embedding is None
        self.rows.append(Row(seq.slot, seq.scheduled, count, new_blocks, sample))
        self.seqs.append(seq)
        self.leases.append(seq.lease)
        self.budget -= count
        seq.schedule(self.step, count, sample)

    def add_drafts(self, index: int, tokens: tuple[int, ...], new_blocks: tuple[int, ...]) -> None:
        """Let row number `index` carry drafts."""
        row, count = self.rows[index], len(tokens)
        blocks = row.new_blocks + new_blocks
        self.rows[index] = replace(row, count=row.count + count, new_blocks=blocks, drafts=tokens)
        self.budget -= count
        self.seqs[index].add_drafts(count)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan that is being computed, and whose each of its rows is, under which lease."""

    plan: StepPlan
    seqs: tuple[Seq, ...]
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Departed:
    """What a sequence held that left while a plan in flight has a row of it; `last_step` is the last such plan."""

    last_step: int
    lease: Lease
    slot: int
