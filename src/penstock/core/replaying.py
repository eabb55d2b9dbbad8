"""Replay: feeds a recorded run to a fresh scheduler and compares every plan.

Because a plan is a pure function of the inputs before it, each must come out the same, down to the last block id.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.contract.errors import PenstockError
from penstock.contract.events import SeqEvent
from penstock.contract.plan import Draft, StepPlan, StepResult
from penstock.contract.request import SequenceRequest
from penstock.core.scheduler import Scheduler
from penstock.core.trace import Abort, Drafts, Drop, Fail, Header, Record, Reset, Stored, TraceReader

__all__ = ["Disagreement", "Replay", "ReplayReport", "replay"]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        steps: plans that were compared and found equal.
        requests: sequences that were submitted.
        tokens: tokens that were drawn.
        seconds: from the first record to the last; 0.0 if the trace has no times.
        truncated: whether the last line was cut short, as by a crash, and left out.
        difference: the first disagreement, with its line; "" when there is none.
    """

    steps: int
    requests: int
    tokens: int
    seconds: float
    truncated: bool
    difference: str

    @property
    def same(self) -> bool:
        """Whether every recorded plan was made again."""
        return not self.difference

    def explain(self) -> str:
        """One line for people."""
        cut = "; the last line was cut short and left out" if self.truncated else ""
        verdict = self.difference or "every plan is the same"
        return f"{self.steps} steps replayed{cut}: {verdict}"


def replay(lines: Iterable[str]) -> ReplayReport:
    """Give a trace's inputs to a fresh scheduler and compare each plan with the recorded one.

    Raises:
        ConfigError: the trace is corrupt or of another version; the message names the line. A last line that was cut
            short is no error.
    """
    records = TraceReader(lines)
    again = Replay(Scheduler(records.header().config))
    began = ended = None
    difference = ""
    for number, record, at in records:
        began, ended = at if began is None else began, at
        try:
            again.apply(record)
        except Disagreement as disagreement:
            difference = f"line {number}: {disagreement}"
        except PenstockError as error:
            difference = f"line {number}: the scheduler refused what was recorded: {error}"
        if difference:
            break
    seconds = 0.0 if began is None or ended is None else ended - began
    return ReplayReport(again.steps, again.requests, again.tokens, seconds, records.truncated, difference)


class Disagreement(Exception):
    """What was recorded cannot have happened, or leads to another plan."""


class Replay:
    """A scheduler that is given everything recorded once more. Owned by the reader of the trace.

    Attributes:
        steps: plans that were made again.
        requests: sequences that were submitted.
        tokens: tokens that the results brought.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[StepPlan] = deque()
        self._drafts: tuple[Draft, ...] = ()
        self.steps = self.requests = self.tokens = 0

    def apply(self, record: Record) -> tuple[SeqEvent, ...]:
        """Apply what was recorded. Returns the resulting events.

        Raises:
            Disagreement: it cannot have happened, or it led to another plan.
        """
        match record:
            case SequenceRequest():
                self._scheduler.submit(record)
                self.requests += 1
            case Abort(seq_id, reason, message):
                return self._scheduler.abort(seq_id, reason, message)
            case Reset():
                self._scheduler.reset_prefix_cache()
            case Drop():
                self._scheduler.drop_in_flight()
                self._in_flight.clear()
            case Fail(killed):
                self._in_flight.clear()
                return self._scheduler.fail_step(killed=killed)
            case Stored(seq_id, blocks):
                self._scheduler.note_stored(seq_id, blocks)
            case Drafts(drafts):
                self._drafts = drafts
            case StepPlan():
                self._plan(record)
            case StepResult():
                if not self._in_flight:
                    raise Disagreement(f"a result of step {record.step} without its plan")
                self.tokens += record.num_tokens
                return self._scheduler.commit(self._in_flight.popleft(), record)
            case Header():
                raise Disagreement("a second header")
        return ()

    def _plan(self, recorded: StepPlan) -> None:
        drafts, self._drafts = self._drafts, ()
        plan = self._scheduler.plan(drafts)
        if plan != recorded:
            raise Disagreement(_first_difference(recorded, plan))
        self._in_flight.append(plan)
        self.steps += 1


def _first_difference(recorded: StepPlan, made: StepPlan) -> str:
    for field in dataclasses.fields(StepPlan):
        then, now = getattr(recorded, field.name), getattr(made, field.name)
        if then != now:
            return f"step {recorded.step}: {field.name} was {then}, is now {now}"
    raise AssertionError("two plans that differ have a field that differs")
