"""Order a complete answer's text and tool calls, and parse call arguments into objects.

Arguments that break off in the middle still become an object: complete members and items are kept; an incomplete string
or number is dropped, with its key. Clients that build objects from streamed arguments (the official ones, with the
`jiter` parser) do the same, so a complete answer shows what they see.
"""

from __future__ import annotations

import json
import math
import re
import sys

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import ChoiceDelta
from penstock.contract.tools import CallPiece, ToolCall

__all__ = ["arguments_object", "closed", "spoken_and_called"]

_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\d.eE])|true|false|null|[ \t\n\r]+'
)
_CLOSERS = {"{": "}", "[": "]"}


def spoken_and_called(delta: ChoiceDelta) -> list[str | ToolCall]:
    """A complete answer's texts and calls, in the order in which the model wrote them."""
    parts: list[str | ToolCall] = []
    for part in delta.in_order(0):
        last = parts[-1] if parts else ""
        if isinstance(part, CallPiece) and not part.id and isinstance(last, ToolCall):
            parts[-1] = ToolCall(last.id, last.name, last.arguments + part.arguments)
        elif isinstance(part, CallPiece):
            parts.append(ToolCall(part.id, part.name, part.arguments))
        else:
            parts.append(part)
    return parts


def arguments_object(text: str) -> JsonObject:
    """Parse arguments that may be truncated; numbers beyond a double's range become the largest double."""
    value: JsonObject = json.loads(closed(text), parse_float=_finite)
    return value


def closed(text: str) -> str:
    """Close the truncated JSON of an object after its last complete value; a complete object stays as it is."""
    end, closers, at = 0, "{}", 0
    open_: list[str] = []
    key = False  # whether the next string is a key
    while (token := _TOKEN.match(text, at)) is not None:
        at, first = token.end(), token.group()[0]
        whole = True  # whether the object may be closed here
        if first in _CLOSERS:
            open_.append(_CLOSERS[first])
            key = first == "{"
        elif first in "}]":
            open_.pop()
        elif first in ",:" or first.isspace() or (first == '"' and key):
            whole = False
            key = first == "," and open_[-1] == "}" if not first.isspace() else key
        if whole:
            end, closers = at, "".join(reversed(open_))
        if not open_:
            break
    return text[:end] + closers


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else math.copysign(sys.float_info.max, number)
