"""`GET /engine/events?model=NAME` of a server of several models: what one of them is doing.

Looking loads no model. Each event has the model's `state` beside what one engine's has; before its first load all
counts are 0.
"""

from __future__ import annotations

import asyncio

from fastapi import Request

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.ports import Health
from penstock.server.hosting.dispatch import Parts
from penstock.server.http.route import Route
from penstock.server.page.engine_events import Look, events_route, snapshot

__all__ = ["route"]

_COUNTS = [name for name in Health.__dataclass_fields__ if name not in ("alive", "reason")]
_NOTHING = Health(alive=True, reason="", **dict.fromkeys(_COUNTS, 0))


def route(parts: Parts, stopping: asyncio.Event) -> Route:
    """The endpoint; `stopping` is set when the server begins to stop."""

    def choose(http_request: Request) -> Look:
        name = http_request.query_params.get("model") or parts.models.names[0]
        main = parts.status(name).model.names[0]

        def look() -> JsonObject:
            part = parts.made(main)
            health = _NOTHING if part is None else part.serving.client.health()
            return snapshot(health) | {"state": parts.status(main).state.value}

        return look

    return events_route(choose, stopping)
