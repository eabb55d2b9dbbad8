"""`GET /engine/events?model=NAME`, `/engine/steps` and so on, of a server of several models: what one of them does.

These endpoints load no model. An event has the model's `state` beside the fields of a server of one model; before the
model is first loaded all counts are 0.
"""

from __future__ import annotations

import asyncio

from fastapi import Request

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.engine_views import EngineViews
from penstock.contract.ports import Health
from penstock.server.hosting.dispatch import Parts
from penstock.server.hosting.relay import NOT_LOADED
from penstock.server.http.access import Access
from penstock.server.http.route import Route
from penstock.server.page.engine_events import Look, events_route, snapshot
from penstock.server.page.engine_views import views_routes

__all__ = ["routes"]

_COUNTS = [name for name in Health.__dataclass_fields__ if name not in ("alive", "reason")]
_NOTHING = Health(alive=True, reason="", **dict.fromkeys(_COUNTS, 0))


def routes(parts: Parts, access: Access, stopping: asyncio.Event) -> tuple[Route, ...]:
    """The endpoints; `stopping` is set when the server begins to stop."""

    def named(http_request: Request) -> str:
        return http_request.query_params.get("model") or parts.models.names[0]

    def choose_views(http_request: Request) -> tuple[str, EngineViews]:
        main = parts.status(named(http_request)).model.names[0]
        part = parts.made(main)
        return main, NOT_LOADED if part is None else part.serving.client

    def choose(http_request: Request) -> Look:
        name = named(http_request)
        main = parts.status(name).model.names[0]

        def look() -> JsonObject:
            part = parts.made(main)
            health = _NOTHING if part is None else part.serving.client.health()
            return snapshot(health) | {"state": parts.status(main).state.value}

        return look

    return events_route(choose, stopping), *views_routes(choose_views, access)
