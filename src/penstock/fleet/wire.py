"""What passes between a fleet's client and a replica: plain values as MessagePack. No message can inject code.

A request is sent as it was resolved, with everything that answers depend on, so any replica computes the same answer.
For the reader of its tool calls, which holds compiled schemas, the message carries what the reader was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from penstock.contract.errors import (
    EngineFault,
    InvalidParameter,
    NeverFits,
    Overloaded,
    PenstockError,
    PromptTooLong,
    ReaderTooSlow,
    RefusalCause,
    RequestError,
    RequestPoisoned,
    Unavailable,
    UnknownModel,
)
from penstock.contract.events import Output
from penstock.contract.request import SequenceRequest
from penstock.contract.tools import ReplyRules, Tool
from penstock.engine import ResolvedRequest
from penstock.engine.written_outputs import OutputRecord, record_of
from penstock.fleet.replica import ReplicaLost, ReplicaState
from penstock.text import TextModel

__all__ = ["read_outputs", "read_request", "read_state", "write_error", "write_outputs", "write_request", "write_state"]


class _Reply(msgspec.Struct, frozen=True):
    """What a `ReplyReader` is made of."""

    tools: tuple[Tool, ...]
    rules: ReplyRules
    opened: bool


class _Request(msgspec.Struct, frozen=True):
    """A `ResolvedRequest`; the prompt, which all its sequences share, is encoded once."""

    id: str
    prompt: tuple[int, ...]
    sequences: tuple[SequenceRequest, ...]
    prompt_text: str
    answered: int
    echo: bool
    reply: _Reply | None
    max_seconds: float
    expected: tuple[tuple[int, ...], ...]
    certified: bool = False


class _Refused(msgspec.Struct, frozen=True, tag="r"):
    """An error in place of outputs; see `_ERRORS`."""

    kind: str
    message: str
    param: str = ""
    code: str = ""
    retry_after: int = 1
    cause: str = ""


class _Lost(msgspec.Struct, frozen=True, tag="l"):
    """The engine behind the replica is dead."""

    reason: str


_ERRORS: dict[str, type[PenstockError]] = {
    each.__name__: each
    for each in (
        *(RequestError, InvalidParameter, PromptTooLong, NeverFits, UnknownModel, ReaderTooSlow),
        *(Overloaded, Unavailable, EngineFault, RequestPoisoned),
    )
}

_Message = list[OutputRecord | _Refused | _Lost]

_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(_Request)
_message = msgspec.msgpack.Decoder(_Message)
_state = msgspec.msgpack.Decoder(ReplicaState)


def write_request(resolved: ResolvedRequest) -> bytes:
    """The message that asks for a request's answer."""
    reader = resolved.reader
    message = _Request(
        id=resolved.id,
        prompt=resolved.prompt,
        sequences=tuple(replace(each, prompt=()) for each in resolved.sequences),
        prompt_text=resolved.prompt_text,
        answered=resolved.answered,
        echo=resolved.echo,
        reply=None if reader is None else _Reply(reader.tools, reader.rules, reader.opened),
        max_seconds=resolved.max_seconds,
        expected=resolved.expected,
        certified=resolved.certified,
    )
    return _encode(message)


def read_request(message: bytes, text: TextModel, now: float) -> ResolvedRequest:
    """The request in a message.

    Args:
        message: from `write_request`.
        text: the model's text half, which parses the answer.
        now: when the message arrives, on the clock of the engine that answers it.

    Raises:
        msgspec.MsgspecError: the bytes are not such a message.
    """
    found = _request.decode(message)
    reply = found.reply
    return ResolvedRequest(
        id=found.id,
        sequences=tuple(replace(each, prompt=found.prompt, arrival=now) for each in found.sequences),
        prompt_text=found.prompt_text,
        answered=found.answered,
        echo=found.echo,
        reader=None if reply is None else text.reply_reader_of(reply.tools, reply.rules, opened=reply.opened),
        max_seconds=found.max_seconds,
        expected=found.expected,
        certified=found.certified,
    )


def write_outputs(outputs: Sequence[Output]) -> bytes:
    """A message with some outputs of one request."""
    return _encode(list(map(record_of, outputs)))


def write_error(error: PenstockError | ReplicaLost) -> bytes:
    """The last message of a stream that has no end of its own: the request was refused, or the engine is dead."""
    if isinstance(error, ReplicaLost):
        return _encode([_Lost(str(error))])
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS), EngineFault.__name__)
    if isinstance(error, RequestError):
        return _encode([_Refused(kind, error.message, error.param, error.code)])
    if isinstance(error, Overloaded):
        cause = error.cause or RefusalCause.OTHER
        refused = _Refused(kind, error.message, retry_after=error.retry_after, cause=cause.value)
        return _encode([refused])
    return _encode([_Refused(kind, str(error))])


def read_outputs(message: bytes) -> list[Output]:
    """The outputs in a message.

    Raises:
        PenstockError: the message holds an error instead of outputs.
        ReplicaLost: the message says that the engine is dead, or it cannot be read.
    """
    try:
        found = _message.decode(message)
    except msgspec.MsgspecError as error:
        raise ReplicaLost(f"it sent what is no message: {error}") from error
    outputs: list[Output] = []
    for each in found:
        if isinstance(each, _Lost):
            raise ReplicaLost(each.reason)
        if isinstance(each, _Refused):
            raise _error(each)
        outputs.append(each.it)
    return outputs


def write_state(state: ReplicaState) -> bytes:
    """The message with a replica's state."""
    return _encode(state)


def read_state(message: bytes) -> ReplicaState:
    """The state in a message. Raises msgspec.MsgspecError."""
    return _state.decode(message)


def _error(refused: _Refused) -> PenstockError:
    """The error that was sent. Some classes write their own messages, so the attributes are set instead."""
    kind = _ERRORS.get(refused.kind, EngineFault)
    error = kind.__new__(kind, refused.message)
    if isinstance(error, RequestError):
        error.message, error.param, error.code = refused.message, refused.param, refused.code
    if isinstance(error, Overloaded):
        error.message, error.retry_after, error.cause = (
            refused.message,
            refused.retry_after,
            RefusalCause(refused.cause),
        )
    return error
