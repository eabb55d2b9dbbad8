"""`GET /engine/steps`, `/engine/prefixes` and `/engine/tenants`: the engine's inner state, on request.

Counts and times only, as in `engine_events`: the prefix cache's shape and sizes, never its content. A caller with a key
sees the shares of all others as one; only an admin sees each of them, under the names that logs use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from fastapi import Request
from starlette.responses import Response

from penstock.api_fields.step_views import step_object
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.engine_views import EngineViews, PrefixTree, TenantShare
from penstock.contract.errors import InvalidParameter
from penstock.server.delivery.serving import Serving
from penstock.server.http.access import Access
from penstock.server.http.caller import Caller, caller_of
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.query import read_query
from penstock.server.http.route import Route

__all__ = ["Choose", "routes", "views_routes"]

TREE_SECONDS = 2.0
"""How long a tree of the prefix cache is reused before it is made again: making one takes milliseconds."""

_STATUSES = (400, 401, 403, 503)
_LARGEST = 2**53

Choose = Callable[[Request], tuple[str, EngineViews]]
"""The model that a request is about, and its engine; it may raise a `RequestError`."""

T = TypeVar("T")


def routes(serving: Serving) -> tuple[Route, ...]:
    """The endpoints of a server of one engine."""
    return views_routes(lambda _: ("", serving.client), serving.access)


def views_routes(choose: Choose, access: Access) -> tuple[Route, ...]:
    """The endpoints. All take a query parameter `model`, which `choose` may read; with one engine it has no effect."""
    trees: dict[str, _Shared[PrefixTree]] = {}  # by model

    async def engine_steps(http_request: Request) -> Response:
        """The latest steps: what each computed, how long it took, how long was expected, and why the queue stalled."""
        query = read_query(http_request, "after", "model", compat=access.compat)
        _, views = choose(http_request)
        recent = await views.recent_steps(_step_number(query.get("after", ["-1"])[-1]))
        return json_response(200, {"object": "list", "data": [step_object(step) for step in recent.steps]})

    async def engine_prefixes(http_request: Request) -> Response:
        """The prefix cache as a tree of prefixes: counts, and no content."""
        read_query(http_request, "model", compat=access.compat)
        model, views = choose(http_request)
        shared = trees.setdefault(model, _Shared())
        return json_response(200, tree_object(await shared.get(views.cached_prefixes, TREE_SECONDS)))

    async def engine_tenants(http_request: Request) -> Response:
        """Each tenant's share of the engine; empty if the server has no keys."""
        read_query(http_request, "model", compat=access.compat)
        _, views = choose(http_request)
        shares = await views.tenant_shares() if access.keys else ()
        return json_response(200, {"object": "list", "data": tenant_objects(shares, caller_of(http_request.scope))})

    return (
        Route("GET", "/engine/steps", engine_steps, answers("EngineSteps", *_STATUSES)),
        Route("GET", "/engine/prefixes", engine_prefixes, answers("EnginePrefixes", *_STATUSES)),
        Route("GET", "/engine/tenants", engine_tenants, answers("EngineTenants", *_STATUSES)),
    )


def tree_object(tree: PrefixTree) -> JsonObject:
    """A tree as JSON."""
    nodes = [node._asdict() for node in tree.nodes]
    return {"block_size": tree.block_size, "blocks": tree.blocks, "left_out": tree.left_out, "nodes": nodes}


def tenant_objects(shares: tuple[TenantShare, ...], caller: Caller) -> list[JsonObject]:
    """Shares as JSON: an admin sees each tenant; any other caller sees its own share, and all others as one."""
    if caller.admin:
        return [_tenant_object(each, own=each.tenant == caller.name) for each in shares]
    own = [each for each in shares if each.tenant == caller.name]
    others = [each for each in shares if each.tenant != caller.name]
    told = [_tenant_object(each, own=True) for each in own]
    if others:
        counts = [sum(column) for column in zip(*[each[1:] for each in others], strict=True)]
        told.append(_tenant_object(TenantShare("", *counts), own=False))
    return told


def _tenant_object(share: TenantShare, *, own: bool) -> JsonObject:
    return share._asdict() | {"own": own}


def _step_number(text: str) -> int:
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= len(str(_LARGEST)) and -1 <= int(text) <= _LARGEST:
        return int(text)
    raise InvalidParameter("after", f"after must be a whole number in -1..{_LARGEST}.")


class _Shared(Generic[T]):
    """A value that takes long to make, made once for all requests within some seconds. Confined to one event loop."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._made: T | None = None
        self._at = 0.0

    async def get(self, make: Callable[[], Awaitable[T]], seconds: float) -> T:
        """The value that was made last; a new one if that is `seconds` or longer ago."""
        async with self._making:
            if self._made is None or time.monotonic() - self._at >= seconds:
                self._made = await make()
                self._at = time.monotonic()
            return self._made
