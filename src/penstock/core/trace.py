"""The trace: everything that went into a scheduler and every plan that came out, as JSON lines; and its replay.

One record a line, `{"<kind>": <body>}`. The first is the header; `submit`, `abort`, `reset`, `drop`, `fail`, `drafts`,
`stored` and `result` are inputs; each `plan` is what the scheduler answered, `drafts` what the next plan was given,
`drop` that the plans in flight were taken back, `fail` that they were because one of them failed as a whole.
Plans and results stand in the order in which they were made and committed. Because a plan is a pure function of the
inputs before it, feeding these to a fresh scheduler must give every plan again, to the last block id.

Decides the file format. Knows no files: it takes and gives lines. Every value survives the round trip exactly.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, cast

from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.events import FinishReason
from penstock.contract.plan import Draft, StepPlan, StepResult
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.scheduler import Scheduler

__all__ = [
    "TRACE_VERSION",
    "ReplayReport",
    "encode_abort",
    "encode_drafts",
    "encode_drop",
    "encode_fail",
    "encode_header",
    "encode_plan",
    "encode_reset",
    "encode_result",
    "encode_stored",
    "encode_submit",
    "replay",
]

TRACE_VERSION = 19


@dataclass(frozen=True, slots=True)
class _Header:
    version: int
    config: SchedulerConfig


@dataclass(frozen=True, slots=True)
class _Abort:
    seq_id: str
    reason: FinishReason
    message: str


@dataclass(frozen=True, slots=True)
class _Reset:
    pass


@dataclass(frozen=True, slots=True)
class _Drop:
    pass


@dataclass(frozen=True, slots=True)
class _Fail:
    killed: bool


@dataclass(frozen=True, slots=True)
class _Drafts:
    drafts: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    seq_id: str
    blocks: int


_Record = _Drafts | _Header | SequenceRequest | _Abort | _Reset | _Drop | _Fail | _Stored | StepPlan | StepResult

KINDS: dict[str, type[_Record]] = {
    "penstock_trace": _Header,
    "submit": SequenceRequest,
    "abort": _Abort,
    "reset": _Reset,
    "drop": _Drop,
    "fail": _Fail,
    "drafts": _Drafts,
    "stored": _Stored,
    "plan": StepPlan,
    "result": StepResult,
}


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        steps: plans that were compared and found equal.
        truncated: whether the last line was cut short, as by a crash, and left out.
        difference: the first disagreement, with its line; "" when there is none.
    """

    steps: int
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


def encode_header(config: SchedulerConfig) -> str:
    """The first line of a trace."""
    return _encode("penstock_trace", _Header(TRACE_VERSION, config))


def encode_submit(request: SequenceRequest) -> str:
    """A request that the scheduler accepted."""
    return _encode("submit", request)


def encode_abort(seq_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> str:
    """A call of `Scheduler.abort`."""
    return _encode("abort", _Abort(seq_id, reason, message))


def encode_reset() -> str:
    """A call of `Scheduler.reset_prefix_cache`."""
    return _encode("reset", _Reset())


def encode_drop() -> str:
    """A call of `Scheduler.drop_in_flight`."""
    return _encode("drop", _Drop())


def encode_fail(killed: bool) -> str:
    """A call of `Scheduler.fail_step`."""
    return _encode("fail", _Fail(killed))


def encode_drafts(drafts: tuple[Draft, ...]) -> str:
    """What the next call of `Scheduler.plan` is given."""
    return _encode("drafts", _Drafts(drafts))


def encode_stored(seq_id: str, blocks: int) -> str:
    """A call of `Scheduler.note_stored`."""
    return _encode("stored", _Stored(seq_id, blocks))


def encode_plan(plan: StepPlan) -> str:
    """What `Scheduler.plan` returned."""
    return _encode("plan", plan)


def encode_result(result: StepResult) -> str:
    """What was given to `Scheduler.commit`."""
    return _encode("result", result)


def replay(lines: Iterable[str]) -> ReplayReport:
    """Give a trace's inputs to a fresh scheduler and compare each plan with the recorded one.

    Raises:
        ConfigError: the trace is corrupt or of another version; the message names the line. A last line that was cut
            short is no error.
    """
    records = _Reader(lines)
    header = next(iter(records), None)
    if header is None or not isinstance(header[1], _Header):
        raise ConfigError("trace", "line 1: not a Penstock trace: the header is missing")
    if header[1].version != TRACE_VERSION:
        raise ConfigError("trace", f"line 1: version {header[1].version}; this Penstock reads {TRACE_VERSION}")
    again, steps = _Replay(Scheduler(header[1].config)), 0
    for number, record in records:
        try:
            again.apply(record)
        except _Disagreement as difference:
            return ReplayReport(steps, records.truncated, f"line {number}: {difference}")
        except PenstockError as error:
            return ReplayReport(
                steps, records.truncated, f"line {number}: the scheduler refused what was recorded: {error}"
            )
        steps += isinstance(record, StepPlan)
    return ReplayReport(steps, records.truncated, "")


class _Disagreement(Exception):
    pass


class _Replay:
    """A scheduler to which everything recorded happens again. Owned by `replay`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[StepPlan] = deque()
        self._drafts: tuple[Draft, ...] = ()

    def apply(self, record: _Record) -> None:
        """Do what was recorded.

        Raises:
            _Disagreement: it cannot have happened, or another plan came of it.
        """
        match record:
            case SequenceRequest():
                self._scheduler.submit(record)
            case _Abort(seq_id, reason, message):
                self._scheduler.abort(seq_id, reason, message)
            case _Reset():
                self._scheduler.reset_prefix_cache()
            case _Drop():
                self._scheduler.drop_in_flight()
                self._in_flight.clear()
            case _Fail(killed):
                self._scheduler.fail_step(killed=killed)
                self._in_flight.clear()
            case _Stored(seq_id, blocks):
                self._scheduler.note_stored(seq_id, blocks)
            case _Drafts(drafts):
                self._drafts = drafts
            case StepPlan():
                self._plan(record)
            case StepResult():
                if not self._in_flight:
                    raise _Disagreement(f"a result of step {record.step} without its plan")
                self._scheduler.commit(self._in_flight.popleft(), record)
            case _Header():
                raise _Disagreement("a second header")

    def _plan(self, recorded: StepPlan) -> None:
        drafts, self._drafts = self._drafts, ()
        plan = self._scheduler.plan(drafts)
        if plan != recorded:
            raise _Disagreement(_first_difference(recorded, plan))
        self._in_flight.append(plan)


def _first_difference(recorded: StepPlan, made: StepPlan) -> str:
    for field in dataclasses.fields(StepPlan):
        then, now = getattr(recorded, field.name), getattr(made, field.name)
        if then != now:
            return f"step {recorded.step}: {field.name} was {then}, is now {now}"
    raise AssertionError("two plans that differ have a field that differs")


# ---- the codec: frozen dataclasses and named tuples <-> JSON, led by their annotations


class _Reader:
    """Iterates over (line number, record). Knows only at the end whether the last line was cut short."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(enumerate(lines, start=1))
        self.truncated = False

    def __iter__(self) -> Iterator[tuple[int, _Record]]:
        for number, line in self._lines:
            try:
                data = json.loads(line)
            except json.JSONDecodeError as error:
                if line.endswith("\n") or next(self._lines, None) is not None:
                    raise ConfigError("trace", f"line {number}: not JSON: {error}") from error
                self.truncated = True
                return
            yield number, _decode_record(data, number)


def _decode_record(data: Any, number: int) -> _Record:
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in KINDS:
        raise ConfigError("trace", f"line {number}: not a record of one of the kinds {', '.join(KINDS)}")
    ((kind, body),) = data.items()
    try:
        return cast("_Record", _decode(KINDS[kind], body))
    except (TypeError, ValueError, PenstockError) as error:
        raise ConfigError("trace", f"line {number}: {kind}: {error}") from error


def _encode(kind: str, record: _Record) -> str:
    return json.dumps({kind: _plain(record)}, separators=(",", ":"), ensure_ascii=True)


def _plain(value: Any) -> Any:
    """A value of the contract as what JSON has; bytes become hexadecimal digits."""
    if _is_record(type(value)):
        return {name: _plain(getattr(value, name)) for name in _hints(cast("Hashable", type(value)))}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    """The types of a record's fields, by name, in order."""
    hints = typing.get_type_hints(kind)
    named = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(cast("type[Any]", kind))]
    return {name: hints[name] for name in named}


def _is_record(kind: Any) -> bool:
    """Whether the values of a type have named fields: a dataclass or a named tuple."""
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


def _decode(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `_plain` made `data` of; anything else is a ValueError that names the field."""
    if _is_record(kind):
        return _decode_fields(cast("type[Any]", kind), data)
    if isinstance(kind, types.UnionType) and typing.get_args(kind)[-1] is types.NoneType:  # `Value | None`
        return None if data is None else _decode(typing.get_args(kind)[0], data)
    if typing.get_origin(kind) is tuple:
        return _decode_tuple(typing.get_args(kind), data)
    if isinstance(kind, types.UnionType) and isinstance(data, list):
        return _decode_either(kind, data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind is bytes and isinstance(data, str):
        return bytes.fromhex(data)
    if type(data) not in _scalars(kind):
        raise ValueError(f"expected {kind}, got {data!r}")
    return data


def _decode_fields(kind: type[Any], data: Any) -> Any:
    hints: dict[str, Any] = _hints(cast("Hashable", kind))
    if not isinstance(data, dict) or data.keys() != hints.keys():
        raise ValueError(f"expected the fields {', '.join(hints)} of {kind.__name__.lstrip('_')}, got {data!r}"[:400])
    return kind(**{name: _decode(hints[name], data[name]) for name in hints})


def _decode_tuple(items: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ValueError(f"expected a list, got {data!r}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(items[0], item) for item in data)
    return tuple(_decode(kind, item) for kind, item in zip(items, data, strict=True))


def _decode_either(kind: types.UnionType, data: list[Any]) -> tuple[Any, ...]:
    """A list as the first tuple type of the union that fits."""
    for each in typing.get_args(kind):
        if typing.get_origin(each) is tuple:
            with suppress(ValueError):
                return _decode_tuple(typing.get_args(each), data)
    raise ValueError(f"expected {kind}, got {data!r}"[:400])


def _scalars(kind: Any) -> tuple[type, ...]:
    """JSON types that an annotation admits. A float may be given as an int: both are numbers to JSON."""
    if isinstance(kind, types.UnionType):
        return typing.get_args(kind)
    return (int, float) if kind is float else (kind,)
