"""`GET /health` for people, `GET /health/live` and `GET /health/ready` for orchestrators.

A process is live while it answers at all, because then restarting it is no cure. It is ready when the engine takes a
message within a time limit, through the same inbox as work: a stuck engine is not ready, even if its thread is alive.
"""

from __future__ import annotations

import asyncio

from fastapi import Response

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import EngineDead
from penstock.contract.ports import EngineClient
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import error_object, json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """`GET /health`, `GET /health/live` and `GET /health/ready`."""

    async def health() -> Response:
        """Whether the engine is alive, and what it is doing."""
        return _health(serving.client)

    async def live() -> Response:
        """Whether the process answers; needs no API key."""
        return json_response(200, {"status": "live"})

    async def ready() -> Response:
        """Whether the engine takes work."""
        reason = await _unready(serving)
        if not reason:
            return json_response(200, {"status": "ready", "reason": ""})
        error = error_object(EngineDead(f"The engine is not ready: {reason}"))
        return json_response(503, {"status": "not ready", "reason": reason} | error)

    return (
        Route("GET", "/health", health, answers("Health", 503)),
        Route("GET", "/health/live", live, answers("Live", 403)),
        Route("GET", "/health/ready", ready, answers("Ready", 401, 403, 503)),
    )


def _health(client: EngineClient) -> Response:
    health = client.health()  # AstrAI's clients read the last two: a server that answers has its model
    body: JsonObject = {
        "status": "ok" if health.alive else "dead",
        "reason": health.reason,
        "running": health.running,
        "waiting": health.waiting,
        "free_blocks": health.free_blocks,
        "total_blocks": health.total_blocks,
        "steps": health.steps,
        "model_loaded": True,
        "engine_ready": health.alive,
    }
    if health.alive:
        return json_response(200, body)
    return json_response(503, body | error_object(EngineDead(f"The engine is dead: {health.reason}")))


async def _unready(serving: Serving) -> str:
    """Why the engine takes no work; "" when it does."""
    seconds = serving.access.limits.heartbeat_seconds
    try:
        async with asyncio.timeout(seconds):
            await serving.client.heartbeat()
    except TimeoutError:
        return f"it has taken no message for {seconds:g} seconds"
    except EngineDead as dead:
        return str(dead)
    return ""
