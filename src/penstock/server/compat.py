"""`--compat`: fields that would be refused are taken out of the body, and listed in the answer's headers.

Decides which refusals are of that sort: those that name a field as unknown or unsupported. A wrong type, a value out of
range or a missing field stays an error. Works on any parser, by asking it again without the field it refused; so what
is listed is exactly what had no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.types import Scope

from penstock.contract.errors import InvalidParameter
from penstock.server.strict_json import JsonObject, printable

__all__ = ["EXTRA_HEADERS", "parse_leniently"]

T = TypeVar("T")
EXTRA_HEADERS = "penstock.headers"
"""Key of the ASGI scope under which headers for the answer are left, whatever the answer will be."""

IGNORABLE = frozenset({"unknown_parameter", "unsupported_parameter"})
MISSING = "missing_value"
MAX_HEADER_CHARS = 4096


def parse_leniently(body: JsonObject, parse: Callable[[JsonObject], T], most: int, scope: Scope) -> T:
    """What `parse` makes of the body once everything it does not support is gone; the rest is noted for the answer.

    Args:
        body: the whole body; it is not changed.
        parse: the endpoint's parser.
        scope: of the request; the note for the answer is left there.
        most: how many fields may be taken out.

    Raises:
        RequestError: as `parse`, where taking out does not help.
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
        if ignored:
            scope.setdefault(EXTRA_HEADERS, {})["x-ignored-params"] = _header(ignored)
        return parsed


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
    """Names separated by commas; what is not plain in a name is percent-encoded, as in URLs."""
    text = ", ".join(quote(name, safe="._-") for name in ignored)
    return text if len(text) <= MAX_HEADER_CHARS else text[:MAX_HEADER_CHARS].rpartition(",")[0] + ", ..."
