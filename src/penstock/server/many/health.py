"""`GET /health`, `/health/live` and `/health/ready` of a server of several models.

The process can serve as long as it answers: a model that is lost is loaded again. It is not ready while it stops, and
while the engine of a loaded model does not respond.
"""

from __future__ import annotations

import asyncio

from fastapi import Response

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import EngineDead
from penstock.contract.hosting import ModelState
from penstock.server.http.failures import ShuttingDown, error_object, json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route
from penstock.server.many.dispatch import Parts

__all__ = ["routes", "stuck"]


async def stuck(parts: Parts) -> str:
    """Why an engine of a loaded model does not respond; "" while all do."""
    for part in parts.present():
        if parts.models.present(part.serving.card.name) is not None and (reason := await part.stuck()):
            return f"{part.serving.card.name}: {reason}"
    return ""


def routes(parts: Parts, stopping: asyncio.Event) -> tuple[Route, ...]:
    """The three endpoints; `stopping` is set when the server begins to stop."""

    async def health() -> Response:
        """What the models are doing, all together."""
        return json_response(200, _health(parts))

    async def live() -> Response:
        """That this process can serve. Needs no API key."""
        return json_response(200, {"status": "live", "reason": ""})

    async def ready() -> Response:
        """Whether the server takes work."""
        reason = "the server is shutting down" if stopping.is_set() else await stuck(parts)
        if not reason:
            return json_response(200, {"status": "ready", "reason": ""})
        failure = ShuttingDown() if stopping.is_set() else EngineDead(f"The engine is not ready: {reason}")
        return json_response(503, {"status": "not ready", "reason": reason} | error_object(failure))

    return (
        Route("GET", "/health", health, answers("Health")),
        Route("GET", "/health/live", live, answers("Live", 403)),
        Route("GET", "/health/ready", ready, answers("Ready", 401, 403, 503)),
    )


def _health(parts: Parts) -> JsonObject:
    """The sums over all models that were loaded so far."""
    each = [part.serving.client.health() for part in parts.present()]
    sums = {
        name: sum(getattr(health, name) for health in each)
        for name in ("running", "waiting", "free_blocks", "total_blocks", "steps")
    }
    states = parts.models.statuses()
    loaded = any(status.state is ModelState.LOADED for status in states)
    return {"status": "ok", "reason": "", **sums, "model_loaded": loaded, "engine_ready": True}
