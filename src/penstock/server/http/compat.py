"""`--compat`: drop fields that would be refused from the body, and list them in a response header.

Only unknown and unsupported fields are dropped; a wrong type, a value out of range or a missing field stays an error.
This works with any parser: it runs again without the field that it refused, so the header lists exactly the fields that
had no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.types import Scope

from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter

__all__ = ["EXTRA_HEADERS", "list_ignored", "parse_leniently"]

T = TypeVar("T")
EXTRA_HEADERS = "penstock.headers"
"""ASGI scope key of extra response headers, which are added to whatever response is sent."""

IGNORABLE = frozenset({"unknown_parameter", "unsupported_parameter"})
MISSING = "missing_value"
MAX_HEADER_CHARS = 4096


def parse_leniently(body: JsonObject, parse: Callable[[JsonObject], T], most: int, scope: Scope) -> T:
    """Parse a body without the fields that `parse` does not support; name them in a response header.

    Args:
        body: the whole body; it is not changed.
        parse: the endpoint's parser.
        most: how many fields may be dropped.
        scope: the request's ASGI scope, which takes the header.

    Raises:
        RequestError: as `parse`, if dropping fields does not help.
    """
    remaining = copy.deepcopy(body)
    ignored: list[str] = []
    refusal: InvalidParameter | None = None
    while True:
        try:
            parsed = parse(copy.deepcopy(remaining))
        except InvalidParameter as error:
            if refusal is not None and error.code == MISSING and error.param == refusal.param:
                raise refusal from None  # a required field with an unsupported value cannot be dropped
            if error.code not in IGNORABLE or len(ignored) >= most or not _take_out(remaining, error.param):
                raise
            refusal = error
            ignored.append(error.param)
            continue
        list_ignored(ignored, scope)
        return parsed


def list_ignored(names: list[str], scope: Scope) -> None:
    """Add ignored names to the `x-ignored-params` response header; without names, add no header."""
    if names:
        headers = scope.setdefault(EXTRA_HEADERS, {})
        before = [headers["x-ignored-params"]] if "x-ignored-params" in headers else []
        headers["x-ignored-params"] = ", ".join([*before, _header(names)])


def _take_out(value: Any, path: str) -> bool:
    """Remove the field at a dotted path of keys and indices; return False if there is none."""
    while True:
        if isinstance(value, dict):
            key = _matching_key(value, path)
            if key is None:
                return False
            if printable(key) == path:
                del value[key]
                return True
            value, path = value[key], path[len(printable(key)) + 1 :]
        elif isinstance(value, list):
            index, _, path = path.partition(".")
            if not index.isdecimal() or int(index) >= len(value) or not path:
                return False  # a list item carries content: it is never dropped
            value = value[int(index)]
        else:
            return False


def _matching_key(value: JsonObject, path: str) -> str | None:
    """The key that `path` names or begins with; keys may contain dots, so the longest match wins."""
    fitting = [key for key in value if printable(key) == path or path.startswith(printable(key) + ".")]
    return max(fitting, key=len, default=None)


def _header(ignored: list[str]) -> str:
    """The names, separated by commas and percent-encoded as in URLs; a list over `MAX_HEADER_CHARS` is cut."""
    text = ", ".join(quote(name, safe="._-") for name in ignored)
    return text if len(text) <= MAX_HEADER_CHARS else text[:MAX_HEADER_CHARS].rpartition(",")[0] + ", ..."
