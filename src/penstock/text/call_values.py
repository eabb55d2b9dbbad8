"""The call in a finished JSON object, under any of the spellings that models use.

Decides when an object is a call (it has a name and arguments, and its tool accepts them) and how its arguments are
written on. Does not know formats or streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Accepts", "FoundCall", "read_call"]


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call whose arguments its tool accepts; `arguments` is JSON text."""

    name: str
    arguments: str


Accepts = Callable[[str, dict[str, Any]], bool]
"""Whether there is a tool of this name that takes these arguments."""


def read_call(text: str, name: str, accepts: Accepts) -> FoundCall | None:
    """The call that a JSON object is; None where it is none.

    Args:
        text: the JSON text.
        name: of the tool whose arguments it is; "" when it names its tool itself.
        accepts: the tools' judgement.
    """
    try:
        value = json.loads(text)
    except ValueError:  # an integer of thousands of digits
        return None
    called, arguments = (name, value) if name else _name_and_arguments(value)
    if not isinstance(called, str) or not isinstance(arguments, dict) or not accepts(called, arguments):
        return None
    written = _written(arguments)
    return None if written is None else FoundCall(called, written)


def _name_and_arguments(entry: Any) -> tuple[Any, Any]:
    """What a call's object says, under any of the names that models use."""
    if not isinstance(entry, dict):
        return None, None
    if isinstance(entry.get("function"), dict):
        entry = entry["function"]
    key = next((key for key in ("arguments", "parameters") if key in entry), None)
    if key is None:
        return None, None
    arguments = entry[key]
    if isinstance(arguments, str):  # some models write the arguments' JSON as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None, None
    return entry.get("name"), {} if arguments is None else arguments


def _written(arguments: dict[str, Any]) -> str | None:
    """The arguments as JSON text; None for what it cannot carry: 1e999, and half of a surrogate pair."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return None
    return text
