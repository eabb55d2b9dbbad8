"""Strict JSON, so that no two programs can interpret one body differently.

Accepts UTF-8 without duplicate keys, with finite numbers, 64-bit integers, whole characters (no lone surrogates) and
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
"""Digits of an integer that are examined; a longer literal is out of range whatever follows."""


VALUE_BYTES, OBJECT_BYTES = 40, 240
"""Bytes per member or item, and additional bytes per object, in CPython."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: Any) -> bytes:
    """JSON in UTF-8, without spaces. Refuses NaN and infinities (`ValueError`): they are not JSON."""
    return _ENCODER.encode(value).encode()


def weight(text: bytes) -> int:
    """Approximate memory, in bytes, of the parsed values of a JSON text; for a piece of a text, its share."""
    values = text.count(b",") + text.count(b"[") + text.count(b":")
    return len(text) + VALUE_BYTES * values + OBJECT_BYTES * text.count(b"{")


def decode(body: bytes) -> JsonObject:
    """Parse `body`, which must be a JSON object (RFC 8259).

    Raises:
        RequestError: it is not strict JSON, or not an object; the message names the place, never the content.
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
    # Python refuses to convert literals of thousands of digits. A truncated literal is out of range too, and `_check`
    # reports where.
    return int(literal[: MAX_INT_DIGITS + 1])


def printable(key: str) -> str:
    """A caller's key, safe to repeat: short, and without control characters or lone surrogates."""
    return "".join(c if c.isprintable() else "?" for c in key[:64])


def _check(root: JsonObject) -> None:
    """Walk the value without recursion and refuse what `json` accepts but strict JSON does not."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        value, path = stack.pop()
        fault = _fault(value, path)
        if fault:
            raise InvalidParameter(".".join(path), f"{'.'.join(path) or 'The body'} {fault}.")
        stack.extend((child, (*path, name)) for name, child in _children(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The members and items of `value` that must be checked too; skips list items that are 64-bit integers."""
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
