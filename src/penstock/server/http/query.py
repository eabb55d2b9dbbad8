"""Read query parameters; unknown ones are refused by name, or with `--compat` ignored and listed.

Lists and objects are written as OpenAI's clients write them: `include[]=a`, `metadata[key]=value`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from starlette.requests import Request

from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter
from penstock.server.http.compat import list_ignored

__all__ = ["PAGE", "flag", "page_of", "read_query"]

T = TypeVar("T")
PAGE = ("after", "limit", "order")
"""Parameters that select a page of a list."""
MOST = 100
BOOLEANS = {"true": True, "false": False}


def read_query(http_request: Request, *known: str, compat: bool) -> dict[str, list[str]]:
    """Return name -> values of the `known` parameters; an object's member keeps its brackets in the name.

    Raises:
        InvalidParameter: there is an unknown parameter, and `compat` is off.
    """
    given: dict[str, list[str]] = {}
    ignored: list[str] = []
    for name, value in http_request.query_params.multi_items():
        plain = name.removesuffix("[]")
        if plain in known or ("[" in plain and plain.partition("[")[0] + "[]" in known):
            given.setdefault(plain, []).append(value)
        elif not compat:
            where = printable(name)
            raise InvalidParameter(where, f"{where!r} is not supported here.", code="unsupported_parameter")
        else:
            ignored.append(printable(name))
    list_ignored(ignored, http_request.scope)
    return given


def flag(query: Mapping[str, Sequence[str]], name: str) -> bool:
    """Read a boolean parameter; false when left out.

    Raises:
        InvalidParameter: it is neither true nor false.
    """
    value = query.get(name, ["false"])[-1]
    if value not in BOOLEANS:
        raise InvalidParameter(name, f"{name} must be true or false.", code="invalid_type")
    return BOOLEANS[value]


def page_of(
    items: Sequence[T], query: Mapping[str, Sequence[str]], id_of: Callable[[T], str], *, order: str = "asc"
) -> tuple[list[T], JsonObject]:
    """The items of a page, and the response's fields beside `data`.

    Args:
        items: all items, in ascending order.
        query: may have `after` (an id), `limit` and `order`.
        id_of: returns an item's id.
        order: the default order, asc or desc.

    Raises:
        InvalidParameter: there is no such page.
    """
    order, limit = query.get("order", [order])[-1], query.get("limit", ["20"])[-1]
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", "order must be asc or desc.")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:4]) <= MOST):
        raise InvalidParameter("limit", f"limit must lie in 1..{MOST}.")
    found = list(items) if order == "asc" else list(items)[::-1]
    if "after" in query:
        ids = [id_of(item) for item in found]
        if query["after"][-1] not in ids:
            raise InvalidParameter("after", "after: there is no such entry in this list.")
        found = found[ids.index(query["after"][-1]) + 1 :]
    page = found[: int(limit)]
    ends = {"first_id": id_of(page[0]) if page else None, "last_id": id_of(page[-1]) if page else None}
    return page, {"object": "list", "has_more": len(found) > len(page)} | ends
