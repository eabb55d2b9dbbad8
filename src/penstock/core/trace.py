"""The trace: everything that went into a scheduler and every plan that came out, as JSON lines.

One record a line, `{"<kind>": <body>, "at": <seconds>}`. The first is the header; `submit`, `abort`, `reset`, `drop`,
`fail`, `drafts`, `stored` and `result` are inputs; each `plan` is the scheduler's answer. `drafts` holds what the next
plan was given; `drop` means that the plans in flight were taken back, `fail` that they were taken back because one of
them failed as a whole. Plans and results stand in the order in which they were made and committed, so that
`core.replaying` can make every plan again. `at` is when it happened, by the clock of arrival times; no decision depends
on it, and a trace that was made without a clock has none.

Decides the file format. Knows no files: it takes and gives lines. Every value survives the round trip exactly.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, cast

from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.events import FinishReason
from penstock.contract.plan import Draft, StepPlan, StepResult
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig

__all__ = [
    "TRACE_VERSION",
    "Abort",
    "Drafts",
    "Drop",
    "Fail",
    "Header",
    "Record",
    "Recorded",
    "Reset",
    "Stored",
    "TraceReader",
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
    "stamped",
]

TRACE_VERSION = 22


@dataclass(frozen=True, slots=True)
class Header:
    """The first record: what the scheduler was made with."""

    version: int
    config: SchedulerConfig


@dataclass(frozen=True, slots=True)
class Abort:
    """A call of `Scheduler.abort`."""

    seq_id: str
    reason: FinishReason
    message: str


@dataclass(frozen=True, slots=True)
class Reset:
    """A call of `Scheduler.reset_prefix_cache`."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A call of `Scheduler.drop_in_flight`."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A call of `Scheduler.fail_step`."""

    killed: bool


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the next call of `Scheduler.plan` was given."""

    drafts: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A call of `Scheduler.note_stored`."""

    seq_id: str
    blocks: int


Record = Drafts | Header | SequenceRequest | Abort | Reset | Drop | Fail | Stored | StepPlan | StepResult

KINDS: dict[str, type[Record]] = {
    "penstock_trace": Header,
    "submit": SequenceRequest,
    "abort": Abort,
    "reset": Reset,
    "drop": Drop,
    "fail": Fail,
    "drafts": Drafts,
    "stored": Stored,
    "plan": StepPlan,
    "result": StepResult,
}


def encode_header(config: SchedulerConfig) -> str:
    """The first line of a trace."""
    return _encode("penstock_trace", Header(TRACE_VERSION, config))


def encode_submit(request: SequenceRequest) -> str:
    """A request that the scheduler accepted."""
    return _encode("submit", request)


def encode_abort(seq_id: str, reason: FinishReason = FinishReason.ABORT, message: str = "") -> str:
    """A call of `Scheduler.abort`."""
    return _encode("abort", Abort(seq_id, reason, message))


def encode_reset() -> str:
    """A call of `Scheduler.reset_prefix_cache`."""
    return _encode("reset", Reset())


def encode_drop() -> str:
    """A call of `Scheduler.drop_in_flight`."""
    return _encode("drop", Drop())


def encode_fail(killed: bool) -> str:
    """A call of `Scheduler.fail_step`."""
    return _encode("fail", Fail(killed))


def encode_drafts(drafts: tuple[Draft, ...]) -> str:
    """What the next call of `Scheduler.plan` is given."""
    return _encode("drafts", Drafts(drafts))


def encode_stored(seq_id: str, blocks: int) -> str:
    """A call of `Scheduler.note_stored`."""
    return _encode("stored", Stored(seq_id, blocks))


def encode_plan(plan: StepPlan) -> str:
    """What `Scheduler.plan` returned."""
    return _encode("plan", plan)


def encode_result(result: StepResult) -> str:
    """What was given to `Scheduler.commit`."""
    return _encode("result", result)


def stamped(line: str, at: float) -> str:
    """A record's line with the time at which it happened, in seconds."""
    return f'{line[:-1]},"at":{at:.6f}}}'


# ---- the codec: frozen dataclasses and named tuples <-> JSON, led by their annotations


class Recorded(NamedTuple):
    """A line of a trace.

    Attributes:
        line: its number, from 1.
        value: what was recorded.
        at: when, in seconds by the clock of arrival times; None if there was no clock.
    """

    line: int
    value: Record
    at: float | None


class TraceReader:
    """Iterates over a trace's records, the header first.

    Args:
        lines: the lines of the trace.

    Raises:
        ConfigError: while iterating: the trace is corrupt or of another version; the message names the line. A last
            line that was cut short is no error.

    Attributes:
        truncated: whether the last line was cut short, as by a crash, and left out; known at the end.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(enumerate(lines, start=1))
        self.truncated = False

    def header(self) -> Header:
        """Read the first record, which says how the scheduler was made. Call it once, before iterating."""
        first = next(iter(self), None)
        if first is None or not isinstance(first.value, Header):
            raise ConfigError("trace", "line 1: not a Penstock trace: the header is missing")
        if first.value.version != TRACE_VERSION:
            raise ConfigError("trace", f"line 1: version {first.value.version}; this Penstock reads {TRACE_VERSION}")
        return first.value

    def __iter__(self) -> Iterator[Recorded]:
        for number, line in self._lines:
            try:
                data = json.loads(line)
            except json.JSONDecodeError as error:
                if line.endswith("\n") or next(self._lines, None) is not None:
                    raise ConfigError("trace", f"line {number}: not JSON: {error}") from error
                self.truncated = True
                return
            yield _decode_record(data, number)


def _decode_record(data: Any, number: int) -> Recorded:
    at = data.pop("at", None) if isinstance(data, dict) else None
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in KINDS:
        raise ConfigError("trace", f"line {number}: not a record of one of the kinds {', '.join(KINDS)}")
    if at is not None and type(at) not in (int, float):
        raise ConfigError("trace", f"line {number}: at: not a number of seconds: {at!r}")
    ((kind, body),) = data.items()
    try:
        return Recorded(number, cast("Record", _decode(KINDS[kind], body)), at)
    except (TypeError, ValueError, PenstockError) as error:
        raise ConfigError("trace", f"line {number}: {kind}: {error}") from error


def _encode(kind: str, record: Record) -> str:
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
