"""JSON as this project reads and writes it: strictly, so that no two programs can understand one body differently.

Accepted is UTF-8 with no duplicate keys, finite numbers, integers of 64 bits, whole characters (no lone surrogates) and
bounded nesting.
Invariant: a value returned by `decode` can be written by `encode` and is a JSON object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from penstock.contract.errors import InvalidParameter, RequestError

__all__ = ["JsonObject", "decode", "encode", "printable", "weight"]

JsonObject = dict[str, Any]

MAX_DEPTH = 64
MIN_INT, MAX_INT = -(2**63), 2**63 - 1
MAX_INT_DIGITS = 20
"""Digits of an integer that are looked at; a longer literal is out of range whatever follows."""


VALUE_BYTES, OBJECT_BYTES = 40, 240
"""What a member or an item, and an object beside it, take in CPython."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Any) -> bytes:
    """JSON in UTF-8, without spaces. Refuses NaN and infinities (`ValueError`): they are not JSON."""
    return _ENCODER.encode(value).encode()


def weight(text: bytes) -> int:
    """Bytes of memory that the values of a JSON text take, nearly; of a piece of one, its share of them."""
    values = text.count(b",") + text.count(b"[") + text.count(b":")
    return len(text) + VALUE_BYTES * values + OBJECT_BYTES * text.count(b"{")


def decode(body: bytes) -> JsonObject:
    """The object that `body` writes down (RFC 8259).

    Raises:
        RequestError: it is not strict JSON, or no object; the message names the place and never repeats the content.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _malformed(f"it is nested more than {MAX_DEPTH} levels deep") from None
    if not isinstance(value, dict):
        raise _malformed("it must be an object")
    _check(value)
    return value


def _malformed(what: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {what}.", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    result: JsonObject = {}
    for key, value in pairs:
        if key in result:
            name = printable(key)
            raise InvalidParameter(name, f"The key {name!r} is given twice in one object.", code="duplicate_key")
        result[key] = value
    return result


def _integer(literal: str) -> int:
    # Python refuses to convert literals of thousands of digits; a cut one is out of range too, and `_check` says where.
    return int(literal[: MAX_INT_DIGITS + 1])


def printable(key: str) -> str:
    """A caller's key, safe to repeat: short, and without control characters or lone surrogates."""
    return "".join(c if c.isprintable() else "?" for c in key[:64])


def _check(root: JsonObject) -> None:
    """Walk the value without recursion and refuse what `json` lets through."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        value, path = stack.pop()
        fault = _fault(value, path)
        if fault:
            raise InvalidParameter(".".join(path), f"{'.'.join(path) or 'The body'} {fault}.")
        stack.extend((child, (*path, name)) for name, child in _children(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of `value` that must be checked too; small integers, booleans and null need not."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield printable(key), child
    elif isinstance(value, list):
        for index, child in enumerate(value):
            if type(child) is not int or not MIN_INT <= child <= MAX_INT:
                yield str(index), child


def _fault(value: Any, path: tuple[str, ...]) -> str:
    if len(path) > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(value, str) and not _whole(value):
        return "holds half of a surrogate pair, which is no character"
    if isinstance(value, dict) and not all(map(_whole, value)):
        return "has a key that holds half of a surrogate pair, which is no character"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
        return "is an integer beyond 64 bits"
    return ""


def _whole(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
