"""Reads a call from a complete JSON object, in any of the spellings that models use.

Decides when an object is a call (it has a name and arguments, and its tool accepts them) and how its arguments are
serialised. Does not know formats or streams.
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
"""Whether there is a tool of this name that accepts these arguments."""


def read_call(text: str, name: str, accepts: Accepts) -> FoundCall | None:
    """Read a JSON object as a call; None if it is not one.

    Args:
        text: the JSON text.
        name: the tool whose arguments the object is; "" if the object names its tool itself.
        accepts: whether a tool accepts the arguments.
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
    """The tool's name and the arguments in a call's object, under any of the keys that models use."""
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
    """The arguments as JSON text; None if that cannot carry them: 1e999 (infinity) or a lone surrogate."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        return None
    return text
