"""Writes outputs of one request as MessagePack, to pass them between processes and to keep them in an answer cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.contract.events import (
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    Output,
    PromptTokens,
    RequestFailed,
    RequestFinished,
)

__all__ = ["OutputRecord", "read_outputs", "record_of", "write_outputs"]


class _Prompt(msgspec.Struct, frozen=True, tag="p"):
    it: PromptTokens


class _Vector(msgspec.Struct, frozen=True, tag="v"):
    it: Embedding


class _Delta(msgspec.Struct, frozen=True, tag="d"):
    it: ChoiceDelta


class _Ended(msgspec.Struct, frozen=True, tag="e"):
    it: ChoiceFinished


class _Finished(msgspec.Struct, frozen=True, tag="f"):
    it: RequestFinished


class _Failed(msgspec.Struct, frozen=True, tag="x"):
    it: RequestFailed


OutputRecord = _Prompt | _Vector | _Delta | _Ended | _Finished | _Failed
"""An output with a tag that says which one it is."""

_KINDS: dict[type, Any] = {
    PromptTokens: _Prompt,
    Embedding: _Vector,
    ChoiceDelta: _Delta,
    ChoiceFinished: _Ended,
    RequestFinished: _Finished,
    RequestFailed: _Failed,
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[OutputRecord]).decode


def record_of(output: Output) -> OutputRecord:
    """The output with its tag."""
    record: OutputRecord = _KINDS[type(output)](output)
    return record


def write_outputs(outputs: Iterable[Output]) -> bytes:
    """The outputs as one message."""
    return _encode(list(map(record_of, outputs)))


def read_outputs(message: bytes) -> list[Output]:
    """The outputs in a message of `write_outputs`. Raises msgspec.MsgspecError."""
    return [each.it for each in _decode(message)]
