"""Where each request's time went: one file, because every moment of a sequence must be in exactly one part.

The engine's thread commits one step after the other, so the life of a sequence is a series of intervals. It waits in
the queue. It runs, through steps and the time between them. If it is preempted or a step fails, it is away until what
it lost is computed again. A part is the sum of the intervals, or of pieces of them, that belong to it. So the parts
always sum to the whole: nothing can be missing or counted twice.

A step needs no call for a sequence that decodes: the sums of what steps took are shared by all sequences (`_Sums`), and
a sequence takes the differences when its state changes. Only sequences whose prompts are computed, rows that wait for a
mask, and sequences that run without a row in the step are handled one by one.

Pure: the caller says when things happened, so replaying a recorded run gives the same parts as the run gave. Not
thread-safe: one owner. Invariant: `_running` holds the sequences that have a slot in the step under way, by slot.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from penstock.contract.measurements import NEXT_STEP, NO_PARTS, PARTS, LatencyParts
from penstock.contract.plan import Admit, StallReason, StepPlan, StepResult
from penstock.contract.request import SequenceRequest
from penstock.core.step_time import StepTimes
from penstock.latency.division import StepShares, divide
from penstock.latency.queueing import QueueClock, Wait

__all__ = ["LatencyBook"]


class _State(StrEnum):
    """What a sequence is doing."""

    WAITING = "waiting"
    PROMPT = "prompt"
    DECODE = "decode"
    AWAY = "away"
    """It lost what was computed of it, and has not caught up yet."""


class _Sums(NamedTuple):
    """Seconds since the start, by what they were spent on; see `StepShares`."""

    decode: float = 0.0
    prompts: float = 0.0
    drafting: float = 0.0
    restored: float = 0.0
    engine: float = 0.0


class _Life:
    """One sequence so far. Owned by the book.

    Attributes:
        parts: seconds by part, as far as they were taken from the sums.
        wait: the beginning of its wait in the queue, while it waits.
        sums: the sums when its state began, while it runs.
        since: when it went away, while it is away.
        why: the part that its time away belongs to.
        drew: whether it has drawn a token.
        reached: leading positions computed so far, while its prompt is computed.
        goal: leading positions at which it has caught up, while it is away and runs.
        slot: where it runs; -1 while it does not run.
        behind: ids of the sequences that it waited for.
    """

    __slots__ = (
        "behind",
        "drew",
        "goal",
        "parts",
        "reached",
        "request",
        "since",
        "slot",
        "state",
        "sums",
        "wait",
        "why",
    )

    def __init__(self, request: SequenceRequest, wait: Wait) -> None:
        self.request = request
        self.wait = wait
        self.state = _State.WAITING
        self.parts: dict[str, float] = {}
        self.sums = _Sums()
        self.since = 0.0
        self.why = ""
        self.drew = False
        self.reached = 0
        self.goal = 0
        self.slot = -1
        self.behind: tuple[str, ...] = ()

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def of_sums(self, spent: StepShares | _Sums) -> tuple[tuple[str, float], ...]:
        """The seconds that steps took, as parts of this sequence in its present state."""
        other = spent.prompts + spent.restored
        own = "other_decodes" if self.state is _State.PROMPT else "decode"
        return (
            (own, spent.decode),
            ("other_prompts", other),
            ("drafting", spent.drafting),
            ("engine", spent.engine),
        )


class LatencyBook:
    """See the module.

    Args:
        times: how long steps take, as the scheduler has learned it.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._lives: dict[str, _Life] = {}
        self._running: dict[int, _Life] = {}
        self._catching: dict[int, _Life] = {}  # running sequences whose prompts are computed, or that are away
        self._guided = 0  # live sequences with a grammar
        self._queue = QueueClock()
        self._sums = _Sums()
        self._until = 0.0  # how far the sums go
        self._in_flight: deque[StepPlan] = deque()
        self._someone_left = False  # whether a sequence ended while the step under way was computed

    # ---- events, in the order in which they can happen

    def submitted(self, request: SequenceRequest, at: float) -> None:
        """Note that a sequence was queued; from its arrival until now it waited for the step under way."""
        self._pass(at)
        life = _Life(request, self._queue.begin(at))
        life.add(NEXT_STEP, max(0.0, at - request.arrival))
        self._lives[request.id] = life
        self._guided += request.grammar is not None

    def planned(self, plan: StepPlan, at: float) -> None:
        """Note that a step was planned; it begins now, or when the step before it is over."""
        self._pass(at)
        self._in_flight.append(plan)
        if len(self._in_flight) == 1:
            self._begin(plan, at)

    def ran(self, result: StepResult, at: float) -> StepShares:
        """Take the result of the oldest step in flight. Returns what its time was spent on."""
        plan, began = self._in_flight.popleft(), self._until
        shares = divide(plan, result, max(0.0, at - began), self._times)
        self._until = max(began, at)
        sums = self._sums
        self._sums = _Sums(
            sums.decode + shares.decode,
            sums.prompts + shares.prompts,
            sums.drafting + shares.drafting,
            sums.restored + shares.restored,
            sums.engine + shares.engine,
        )
        if self._guided:
            self._note_waits(result, shares)
        if self._someone_left or len(plan.rows) != len(self._running):
            self._note_left_out(plan, shares)
        if self._catching:
            self._advance(plan, shares)
        if self._in_flight:
            self._begin(self._in_flight[0], at)
        return shares

    def failed(self, at: float) -> None:
        """Note that the plans in flight were taken back: all running sequences lose what was computed of them."""
        self._queue.advance(at)
        for life in self._running.values():
            self._send_away(life, "recovery")
        self._running.clear()
        self._catching.clear()
        self._in_flight.clear()
        self._until = max(self._until, at)

    def ended(self, seq_id: str, at: float) -> LatencyParts:
        """Note that a sequence has ended. Returns its parts, which sum to the time from its arrival until `at`."""
        life = self._lives.pop(seq_id, None)
        if life is None:
            return NO_PARTS
        self._guided -= life.request.grammar is not None
        if self._running.get(life.slot) is life:
            del self._running[life.slot]
            self._catching.pop(life.slot, None)
            self._someone_left = bool(self._in_flight)
        self._settle(life, at)
        return _frozen(life)

    def running(self) -> dict[int, str]:
        """The sequences that have a slot in the step under way, by slot."""
        return {slot: life.request.id for slot, life in self._running.items()}

    def so_far(self, seq_id: str) -> LatencyParts:
        """The parts of a live sequence, up to the last step or plan; `NO_PARTS` if it is not live."""
        life = self._lives.get(seq_id)
        if life is None:
            return NO_PARTS
        kept = dict(life.parts), life.behind, life.sums
        self._settle(life, self._until)
        parts = _frozen(life)
        life.parts, life.behind, life.sums = kept
        return parts

    # ---- steps

    def _pass(self, at: float) -> None:
        """Count the time until `at` as the engine's, if no step is computed."""
        if not self._in_flight and at > self._until:
            self._sums = self._sums._replace(engine=self._sums.engine + at - self._until)
            self._until = at

    def _begin(self, plan: StepPlan, at: float) -> None:
        """Begin a step: what its plan decided happens now."""
        self._someone_left = False
        self._queue.advance(at)
        why = "recovery" if plan.stalls and plan.stalls[0].reason is StallReason.SUSPECTS else "preempted"
        for slot in plan.releases:
            life = self._running.pop(slot, None)
            if life is not None:  # ended sequences are gone, so this one lost its slot
                self._catching.pop(slot, None)
                self._send_away(life, why)
        for admit in plan.admits:
            life = self._lives.get(admit.seq_id)
            if life is not None:  # else it was submitted to the scheduler by hand, or it has ended meanwhile
                self._admit(life, admit)
        self._queue.planned(plan.stalls, (life.request.id for life in self._running.values()))

    def _admit(self, life: _Life, admit: Admit) -> None:
        life.slot = admit.slot
        self._running[admit.slot] = self._catching[admit.slot] = life
        if life.state is _State.WAITING:
            self._end_wait(life)
            life.reached = admit.computed
            self._enter(life, _State.PROMPT)
            return
        life.goal = len(admit.tokens) if life.drew else life.reached
        self._catch_up(life, admit.computed)

    def _advance(self, plan: StepPlan, shares: StepShares) -> None:
        """Advance the sequences whose prompts are computed, and the sequences that catch up."""
        rows = [row for row in plan.rows if row.slot in self._catching]
        for row in rows:
            life, end = self._catching[row.slot], row.start + row.count
            if life.state is _State.AWAY:
                self._catch_up(life, end)
                continue
            if not shares.of_rows or row.slot not in shares.of_rows:  # the last position of a prompt that was cached
                self._take(life, "other_decodes", "prompt", shares.decode / max(1, shares.decoding))
            else:
                part = "restored" if row.stored else "prompt"
                self._take(life, "other_prompts", part, shares.of_rows[row.slot])
            life.reached = end
            if row.sample:
                self._settle_sums(life)
                life.drew = True
                self._enter(life, _State.DECODE)

    def _catch_up(self, life: _Life, reached: int) -> None:
        """Note how many leading positions a sequence that is away has again; at its goal it runs on."""
        if reached < life.goal:
            return
        life.add(life.why, self._until - life.since)
        self._enter(life, _State.DECODE if life.drew else _State.PROMPT)

    def _note_waits(self, result: StepResult, shares: StepShares) -> None:
        """Count the step as `grammar` for rows that drew nothing because a mask was not ready."""
        for slot in [each.slot for each in result.rows if each.waits]:
            life = self._running.get(slot)
            if life is not None and life.state is _State.DECODE:  # a chunk that waits was computed all the same
                self._lose(life, "grammar", shares)

    def _note_left_out(self, plan: StepPlan, shares: StepShares) -> None:
        """Count the step as `left_out` for running sequences without a row in it."""
        present = {row.slot for row in plan.rows}
        for slot, life in self._running.items():
            if slot not in present and life.state is not _State.AWAY:
                self._lose(life, "left_out", shares)

    # ---- one sequence

    def _take(self, life: _Life, source: str, part: str, seconds: float) -> None:
        """Move seconds to `part` from `source`, in which the sums will count them."""
        life.add(source, -seconds)
        life.add(part, seconds)

    def _lose(self, life: _Life, part: str, shares: StepShares) -> None:
        """Count the whole step as `part`, instead of what the sums say."""
        for name, seconds in life.of_sums(shares):
            life.add(name, -seconds)
        life.add(part, shares.total)

    def _enter(self, life: _Life, state: _State) -> None:
        """Begin to run in a state, from where the sums are."""
        life.state, life.sums = state, self._sums
        if state is _State.DECODE:
            self._catching.pop(life.slot, None)

    def _send_away(self, life: _Life, why: str) -> None:
        """Note that a sequence lost its slot at the end of the last step."""
        if life.state is not _State.AWAY:
            self._settle_sums(life)
            life.state, life.why, life.since = _State.AWAY, why, self._until
        life.slot = -1

    def _settle(self, life: _Life, at: float) -> None:
        """Add the time of its present state, until `at`, to its parts."""
        if life.state is _State.WAITING:
            self._queue.advance(at)
            self._end_wait(life)
        elif life.state is _State.AWAY:
            life.add(life.why, at - life.since)
        else:
            self._settle_sums(life)
            if at > self._until:  # it was aborted between two steps, or while one was computed
                life.add(str(life.state) if self._in_flight else "engine", at - self._until)

    def _end_wait(self, life: _Life) -> None:
        for reason, seconds in self._queue.end(life.wait).items():
            life.add(reason, seconds)
        life.behind = self._queue.behind(life.wait, life.request.id)

    def _settle_sums(self, life: _Life) -> None:
        spent = _Sums(*[now - before for now, before in zip(self._sums, life.sums, strict=True)])
        for part, seconds in life.of_sums(spent):
            life.add(part, seconds)
        life.sums = self._sums


_PARTS = frozenset(PARTS)


def _frozen(life: _Life) -> LatencyParts:
    """The parts of a sequence as a value; names that are not parts are reasons to wait in the queue."""
    parts = {name: seconds for name, seconds in life.parts.items() if name in _PARTS}
    reasons = {name: seconds for name, seconds in life.parts.items() if name not in _PARTS and seconds > 0.0}
    return LatencyParts(**parts, queue=sum(reasons.values()), queue_for=tuple(reasons.items()), behind=life.behind)
