"""`--compat`: fields that would be refused are taken out of the body, and listed in the answer's headers.

Only fields that are unknown or unsupported are taken out; a wrong type, a value out of range or a missing field stays
an error. This works with any parser: it is run again without the field that it refused, so the header lists exactly
what had no effect.
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
"""Key of the ASGI scope under which headers for the answer are left, whatever the answer will be."""

IGNORABLE = frozenset({"unknown_parameter", "unsupported_parameter"})
MISSING = "missing_value"
MAX_HEADER_CHARS = 4096


def parse_leniently(body: JsonObject, parse: Callable[[JsonObject], T], most: int, scope: Scope) -> T:
    """Parse a body without the fields that `parse` does not support; their names go into the answer's headers.

    Args:
        body: the whole body; it is not changed.
        parse: the endpoint's parser.
        scope: the request's ASGI scope; the header is left there for the answer.
        most: how many fields may be taken out.

    Raises:
        RequestError: as `parse`, where taking fields out does not help.
    """
    remaining = copy.deepcopy(body)
    ignored: list[str] = []
    refusal: InvalidParameter | None = None
    while True:
        try:
            parsed = parse(copy.deepcopy(remaining))
        except InvalidParameter as error:
            if refusal is not None and error.code == MISSING and error.param == refusal.param:
                raise refusal from None  # what is not supported there cannot be left out either
            if error.code not in IGNORABLE or len(ignored) >= most or not _take_out(remaining, error.param):
                raise
            refusal = error
            ignored.append(error.param)
            continue
        list_ignored(ignored, scope)
        return parsed


def list_ignored(names: list[str], scope: Scope) -> None:
    """Name what was left out in the answer's headers; where nothing was, there is no header."""
    if names:
        headers = scope.setdefault(EXTRA_HEADERS, {})
        before = [headers["x-ignored-params"]] if "x-ignored-params" in headers else []
        headers["x-ignored-params"] = ", ".join([*before, _header(names)])


def _take_out(value: Any, path: str) -> bool:
    """Remove the field at a dotted path of keys and indices; False where there is none."""
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
                return False  # an item of a list carries content: it is never left out
            value = value[int(index)]
        else:
            return False


def _matching_key(value: JsonObject, path: str) -> str | None:
    """The key that `path` names or begins with; keys may hold dots themselves, so the longest wins."""
    fitting = [key for key in value if printable(key) == path or path.startswith(printable(key) + ".")]
    return max(fitting, key=len, default=None)


def _header(ignored: list[str]) -> str:
    """Names separated by commas; special characters in a name are percent-encoded, as in URLs."""
    text = ", ".join(quote(name, safe="._-") for name in ignored)
    return text if len(text) <= MAX_HEADER_CHARS else text[:MAX_HEADER_CHARS].rpartition(",")[0] + ", ..."
