"""Reads a request's life from a record: the parts that the engine gave, step by step, and whose prompts it met.

The record is replayed: which sequences ended, and how long steps were expected to take, follows from it as in the
recorded run. So the record needs nothing more than a replay needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.events import Finished
from penstock.contract.measurements import NO_PARTS, PARTS, TURN, LatencyParts
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.request import SequenceRequest
from penstock.core.replaying import Disagreement, Replay
from penstock.core.scheduler import Scheduler
from penstock.core.trace import Abort, Drop, Fail, Recorded, TraceReader
from penstock.latency.book import LatencyBook

__all__ = ["Life", "Lives", "Tile", "lives_of"]


@dataclass(frozen=True, slots=True)
class Tile:
    """An interval of a sequence's life.

    Attributes:
        began, ended: instants on the record's clock, in seconds.
        name: what the engine did in it: a step, with its number, or what came between steps.
        parts: seconds by part; they sum to the interval.
        told: the step's plan in words; "" if there is none.
    """

    began: float
    ended: float
    name: str
    parts: tuple[tuple[str, float], ...]
    told: str = ""


@dataclass(slots=True)
class Life:
    """A sequence of a recorded run, so far.

    Attributes:
        id: the sequence's id.
        arrived: an instant on the record's clock, in seconds.
        ended: an instant on the same clock; None if the sequence had not ended when the record did.
        parts: where the time went.
        tiles: the same time as intervals, in order and without gaps.
        met: seconds of its steps that the prompts of other sequences took, by the ids of those sequences.
    """

    id: str
    arrived: float
    ended: float | None = None
    parts: LatencyParts = NO_PARTS
    tiles: list[Tile] = field(default_factory=list)
    met: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lives:
    """The sequences of one answer.

    Attributes:
        all: in the order in which they ended; at least one.
        truncated: whether the record's last line was cut short and therefore left out.
    """

    all: tuple[Life, ...]
    truncated: bool

    @property
    def last(self) -> Life:
        """The sequence that ended last, or has not ended: the answer was not complete before that."""
        return max(reversed(self.all), key=lambda life: float("inf") if life.ended is None else life.ended)

    @property
    def parts(self) -> LatencyParts:
        """The answer's parts: the last sequence's, and how long it waited for its turn among the answer's prompts."""
        waited = self.last.arrived - min(life.arrived for life in self.all)
        return self.last.parts.queued(waited, TURN) if waited > 0.0 else self.last.parts


def lives_of(answer_id: str, lines: Iterable[str]) -> Lives:
    """The sequences of the answer, or the sequence, with this id in a trace.

    Raises:
        ConfigError: the trace is corrupt, of another version, cannot be replayed, has no times, or has no such id.
    """
    records = TraceReader(lines)
    reading = _Reading(answer_id, Scheduler(records.header().config))
    for record in records:
        try:
            reading.take(record)
        except (Disagreement, PenstockError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError("record", f"line {record.line} cannot be replayed: {error}") from error
    if not reading.lives:
        raise ConfigError("record", f"there is no {answer_id} in it")
    return Lives(tuple(reading.lives.values()), records.truncated)


class _Reading:
    """Replays a record with a scheduler and a book. Owned by `lives_of`."""

    def __init__(self, answer_id: str, scheduler: Scheduler) -> None:
        self.lives: dict[str, Life] = {}
        self._answer_id = answer_id
        self._replay = Replay(scheduler)
        self._book = LatencyBook(scheduler.times)
        self._plans: dict[int, StepPlan] = {}

    def take(self, record: Recorded) -> None:
        """Replay the next record."""
        if record.at is None:
            raise ConfigError("record", f"line {record.line} says no time; record with a server of this version")
        value, at, name, told = record.value, record.at, "between steps", ""
        met: dict[str, float] = {}
        if isinstance(value, StepResult):
            plan = self._plans.pop(value.step, None)
            name, told = f"step {value.step}", "" if plan is None else plan.explain()
            running = self._book.running() if self._open else {}
            shares = self._book.ran(value, at)  # before the scheduler learns from it how long steps take
            met = {running[slot]: seconds for slot, seconds in shares.of_rows.items() if slot in running}
        elif isinstance(value, Fail | Drop):
            self._plans.clear()
            self._book.failed(at)
            name = "a step that failed" if isinstance(value, Fail) else "a step that was interrupted"
        events = self._replay.apply(value)
        if isinstance(value, SequenceRequest):
            self._submit(value, at)
        elif isinstance(value, StepPlan):
            self._plans[value.step] = value
            self._book.planned(value, at)
        self._look(name, told, met)
        ended = [event.seq_id for event in events if isinstance(event, Finished)]
        for seq_id in (value.seq_id,) if isinstance(value, Abort) else ended:
            self._end(seq_id, at)

    @property
    def _open(self) -> list[Life]:
        return [life for life in self.lives.values() if life.ended is None]

    def _submit(self, request: SequenceRequest, at: float) -> None:
        self._book.submitted(request, at)
        if request.id == self._answer_id or request.id.startswith((self._answer_id + "/", self._answer_id + "-")):
            self.lives[request.id] = Life(request.id, request.arrival)

    def _look(self, name: str, told: str, met: dict[str, float]) -> None:
        """Bring the lives of the sequences that were asked for up to date."""
        for life in self._open:
            before = life.parts
            self._note(life, self._book.so_far(life.id), name, told)
            if life.parts.other_prompts > before.other_prompts:
                for seq_id, seconds in met.items():
                    if seq_id != life.id:
                        life.met[seq_id] = life.met.get(seq_id, 0.0) + seconds

    def _end(self, seq_id: str, at: float) -> None:
        parts = self._book.ended(seq_id, at)
        life = self.lives.get(seq_id)
        if life is not None and life.ended is None:
            self._note(life, parts, "between steps", "")
            life.ended = at
            self.lives[seq_id] = self.lives.pop(seq_id)

    def _note(self, life: Life, parts: LatencyParts, name: str, told: str) -> None:
        """Set the parts of a life, and add a tile with what they grew by."""
        before, life.parts = life.parts, parts
        began = life.arrived + before.total
        spent = [(each, getattr(parts, each) - getattr(before, each)) for each in PARTS]
        grown = tuple((each, seconds) for each, seconds in spent if seconds > _NOTHING)
        if grown:
            life.tiles.append(Tile(began, life.arrived + parts.total, name, grown, told))


_NOTHING = 1e-9
"""Seconds; smaller differences come from rounding."""
