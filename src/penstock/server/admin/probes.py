"""`GET /health` for people, `GET /health/live` and `GET /health/ready` for orchestrators; see `readiness`.

The event loop that serves requests answers them, on the probe port too: a separate thread would keep reporting that all
is well while that loop is stuck.
"""

from __future__ import annotations

from fastapi import Response

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import EngineDead
from penstock.contract.ports import EngineClient
from penstock.server.admin.readiness import STOPPING, Readiness
from penstock.server.http.failures import ShuttingDown, error_object, json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(client: EngineClient, readiness: Readiness) -> tuple[Route, ...]:
    """`GET /health`, `GET /health/live` and `GET /health/ready`."""

    async def health() -> Response:
        """Whether the engine is alive, and what it is doing."""
        return _health(client, readiness)

    async def live() -> Response:
        """Whether this process can serve, now or later; if not, start another. Needs no API key."""
        reason = readiness.dead()
        if not reason:
            return json_response(200, {"status": "live", "reason": ""})
        error = error_object(EngineDead(f"This process cannot serve any more: {reason}"))
        return json_response(503, {"status": "dead", "reason": reason} | error)

    async def ready() -> Response:
        """Whether the server takes work."""
        reason = await readiness.unready()
        if not reason:
            return json_response(200, {"status": "ready", "reason": ""})
        failure = ShuttingDown() if reason == STOPPING else EngineDead(f"The engine is not ready: {reason}")
        return json_response(503, {"status": "not ready", "reason": reason} | error_object(failure))

    return (
        Route("GET", "/health", health, answers("Health", 503)),
        Route("GET", "/health/live", live, answers("Live", 403, 503)),
        Route("GET", "/health/ready", ready, answers("Ready", 401, 403, 503)),
    )


def _health(client: EngineClient, readiness: Readiness) -> Response:
    health = client.health()  # AstrAI's clients read the last two fields; a server that answers has its model
    body: JsonObject = {
        "status": "ok" if health.alive else "dead",
        "reason": readiness.known_unready(),
        "running": health.running,
        "waiting": health.waiting,
        "free_blocks": health.free_blocks,
        "total_blocks": health.total_blocks,
        "steps": health.steps,
        "model_loaded": True,
        "engine_ready": not readiness.known_unready(),
    }
    if health.alive:
        return json_response(200, body)
    return json_response(503, body | error_object(EngineDead(f"The engine is dead: {health.reason}")))
