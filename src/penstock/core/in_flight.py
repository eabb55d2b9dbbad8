"""Steps that are planned and not yet committed, and what they still use.

Decides in which order results are taken, and when the blocks and the slot of a departed sequence become free: once no
plan in flight has a row of it. Changes neither pool nor sequences. Invariant: steps are committed in the order in which
they were planned.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.contract.errors import EngineFault
from penstock.contract.plan import RowResult, StepPlan, StepResult
from penstock.core.block_pool import Lease
from penstock.core.row_check import mismatch
from penstock.core.sequence import Seq

__all__ = ["Departed", "InFlight", "InFlightStep"]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan in flight, with the sequence and the lease of each of its rows."""

    plan: StepPlan
    seqs: tuple[Seq, ...]
    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Departed:
    """What a departed sequence held while plans in flight have rows of it; `last_step` is the last such plan."""

    last_step: int
    lease: Lease
    slot: int


class InFlight:
    """Planned steps, oldest first. Owned by the scheduler.

    Args:
        depth: plans that may be in flight at once.

    Attributes:
        next_step: the number of the plan that is made next.
        departed: what departed sequences held that cannot be given back yet.
    """

    __slots__ = ("_depth", "_steps", "departed", "next_step")

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[InFlightStep] = deque()
        self.next_step = 0
        self.departed: list[Departed] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether one more plan may be made now."""
        return len(self._steps) < self._depth

    @property
    def horizon(self) -> int:
        """The first step that may be in flight when blocks are handed out next; what earlier steps used is free."""
        eldest = self._steps[0].plan.step if self._steps else self.next_step
        return max(eldest, self.next_step - self._depth + 1)

    def uses(self, seq: Seq) -> bool:
        """Whether blocks of `seq` that are handed out next could be read or written by a plan that was made before."""
        return seq.last_step >= self.horizon

    def require_room(self) -> None:
        """Make sure that one more plan may be made.

        Raises:
            EngineFault: as many plans as may be in flight have not been committed.
        """
        if len(self._steps) >= self._depth:
            raise EngineFault(f"plan {self._steps[0].plan.step} has not been committed")

    def add(self, step: InFlightStep) -> None:
        """Note the newest plan."""
        self._steps.append(step)
        self.next_step += 1

    def match(self, plan: StepPlan, result: StepResult) -> tuple[InFlightStep, list[RowResult | None]]:
        """The oldest step and the result of each of its rows.

        Raises:
            EngineFault: `plan` is not the oldest, or `result` cannot belong to it.
        """
        if not self._steps or plan != self._steps[0].plan:
            raise EngineFault(f"plan {plan.step} is not the eldest in flight")
        if result.step != plan.step:
            raise EngineFault(f"a result of step {result.step} came for plan {plan.step}")
        eldest, by_slot = self._steps[0], {each.slot: each for each in result.rows}
        results = [by_slot.pop(row.slot, None) for row in plan.rows]
        if by_slot or len(results) - results.count(None) != len(result.rows):
            raise EngineFault(f"step {plan.step}: results name slots that have no row, or one twice")
        for row, seq, of_row in zip(plan.rows, eldest.seqs, results, strict=True):
            fault = mismatch(row, seq, of_row)
            if fault:
                raise EngineFault(f"step {plan.step}, slot {row.slot}: {fault}")
        return eldest, results

    def end_eldest(self) -> None:
        """Forget the oldest step: it has its result."""
        self._steps.popleft()

    def everyone(self) -> dict[Seq, bool]:
        """The sequences with rows in steps in flight, and whether each still runs under the lease of that row."""
        pairs = [pair for step in self._steps for pair in zip(step.seqs, step.leases, strict=True)]
        return {seq: all(seq.holds(lease) for other, lease in pairs if other is seq) for seq, _ in pairs}

    def drop(self) -> None:
        """Forget every step: none of them will have a result."""
        self._steps.clear()

    def keep(self, seq: Seq) -> None:
        """`seq` leaves while a plan uses it: keep its lease and its slot until `let_go` returns them."""
        self.departed.append(Departed(seq.last_step, seq.lease, seq.slot))

    def let_go(self) -> list[Departed]:
        """What departed sequences held and no plan in flight uses any more; forgotten here from now on."""
        if not self.departed:  # the usual case, once a step
            return []
        horizon = self.horizon
        free = [each for each in self.departed if each.last_step < horizon]
        self.departed = [each for each in self.departed if each.last_step >= horizon]
        return free
