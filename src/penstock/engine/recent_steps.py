"""Keeps the latest steps, for views of what the engine does.

A step costs the engine's thread one append: an entry refers to the plan's rows, which are frozen, and to the shares of
its time, which were computed anyway. Views are computed from a snapshot, in the thread of the caller that asks. Plans
are not kept whole, because they hold prompts. Decides how many steps are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.contract.engine_views import OwnPart, RecentSteps, StepStall, StepView
from penstock.contract.plan import Row, Stall, StepPlan
from penstock.core.step_time import row_decodes
from penstock.latency import StepShares

__all__ = ["MOST_ROWS", "MOST_STEPS", "MOST_TOLD", "KeptSteps", "StepRing", "told"]

MOST_STEPS = 1024
MOST_TOLD = 300
"""Most steps returned at once if no request is asked about: more than a person sees, and quickly computed."""
MOST_ROWS = 16_384
"""Rows of all kept steps together: some 3 MB. With 64 sequences, the last 256 steps."""


class _Kept(NamedTuple):
    """One step. `admits` has pairs of a slot and the id of the sequence that has the slot from this step on."""

    step: int
    rows: tuple[Row, ...]
    stalls: tuple[Stall, ...]
    waiting: int
    admits: tuple[tuple[int, str], ...]
    at: float
    foreseen: float
    shares: StepShares


class KeptSteps(NamedTuple):
    """A snapshot: the steps that are kept, and which sequence had which slot before the first of these steps."""

    steps: tuple[_Kept, ...]
    owners: Mapping[int, str]


class StepRing:
    """The latest steps. Owned by the engine.

    Args:
        most_steps: most steps that are kept.
        most_rows: most rows of all kept steps together; the last step is always kept.
    """

    __slots__ = ("_most_rows", "_most_steps", "_owners", "_rows", "_steps")

    def __init__(self, most_steps: int = MOST_STEPS, most_rows: int = MOST_ROWS) -> None:
        self._most_steps = most_steps
        self._most_rows = most_rows
        self._steps: deque[_Kept] = deque()
        self._owners: dict[int, str] = {}  # of slots, before the oldest step that is kept
        self._rows = 0

    def add(self, plan: StepPlan, shares: StepShares, foreseen: float, at: float) -> None:
        """Keep a step that was computed and committed.

        Args:
            plan: the step's plan.
            shares: what the step's time was spent on.
            foreseen: seconds that the step was expected to take.
            at: when its result came.
        """
        rows = plan.rows
        admits = tuple([(admit.slot, admit.seq_id) for admit in plan.admits]) if plan.admits else ()
        self._steps.append(_Kept(plan.step, rows, plan.stalls, plan.waiting, admits, at, foreseen, shares))
        self._rows += len(rows)
        while len(self._steps) > self._most_steps or (self._rows > self._most_rows and len(self._steps) > 1):
            eldest = self._steps.popleft()
            self._rows -= len(eldest.rows)
            if eldest.admits:
                self._owners.update(eldest.admits)

    def snapshot(self) -> KeptSteps:
        """What is kept now, as a value that another thread may read."""
        return KeptSteps(tuple(self._steps), self._owners.copy())


def told(kept: KeptSteps, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:
    """The views of kept steps that a caller gets; see `EngineViews.recent_steps`."""
    if not requests:
        return RecentSteps(tuple([_view(each) for each in kept.steps[-MOST_TOLD:] if each.step > after]))
    views = list(_own_views(kept, requests))
    numbers = [index for index, view in enumerate(views) if view.own is not None and view.own.positions]
    if not numbers:
        return RecentSteps(())
    first, last = numbers[0], numbers[-1]
    cut = first == 0 and any(_request_of(owner) in requests for owner in kept.owners.values())
    return RecentSteps(tuple([view for view in views[first : last + 1] if view.step > after]), cut)


def _own_views(kept: KeptSteps, requests: frozenset[str]) -> Iterator[StepView]:
    """Every step with the part that these requests had in it."""
    own = {slot for slot, owner in kept.owners.items() if _request_of(owner) in requests}
    for each in kept.steps:
        for slot, owner in each.admits:
            if _request_of(owner) in requests:
                own.add(slot)
            else:
                own.discard(slot)
        yield _view(each, own)


def _request_of(seq_id: str) -> str:
    """The id of the engine request that a sequence belongs to."""
    return seq_id.rpartition("/")[0]


def _view(kept: _Kept, own: set[int] | None = None) -> StepView:
    shares, decoding = kept.shares, [row for row in kept.rows if row_decodes(row)]
    drafted = sum([len(row.drafts) for row in decoding])
    read = sum([row.count for row in kept.rows if row.stored])
    return StepView(
        step=kept.step,
        at=kept.at,
        decode=shares.decode,
        prompts=shares.prompts,
        drafting=shares.drafting,
        restored=shares.restored,
        engine=shares.engine,
        foreseen=kept.foreseen,
        decoding=len(decoding),
        drafted=drafted,
        chunk=sum([row.count for row in kept.rows]) - read - len(decoding) - drafted,
        read=read,
        waiting=kept.waiting,
        stall=StepStall(kept.stalls[0].reason, kept.stalls[0].need, kept.stalls[0].have) if kept.stalls else None,
        own=None if own is None else _own_part(kept, own, len(decoding) + drafted),
    )


def _own_part(kept: _Kept, own: set[int], decoded: int) -> OwnPart:
    """What the rows in these slots had in a step whose decoding rows computed `decoded` positions."""
    decode, prompts, positions = 0.0, 0.0, 0
    for row in kept.rows:
        if row.slot not in own:
            continue
        positions += row.count
        if row_decodes(row):
            decode += kept.shares.decode * row.count / decoded
        else:
            prompts += kept.shares.of_rows.get(row.slot, 0.0)
    return OwnPart(decode, prompts, positions)
