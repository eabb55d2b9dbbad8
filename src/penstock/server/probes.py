"""`GET /health/live` and `GET /health/ready`: the two questions that orchestrators ask.

Decides that a process is live while it answers at all (restarting it is then no cure), and ready when the engine itself
takes a message, on the way that work takes, within a time limit: an engine that is stuck is not ready, however well its
thread looks from outside. Knows no states of the engine beyond that.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Response

from penstock.contract.errors import EngineDead
from penstock.server.failures import error_object, json_response
from penstock.server.openapi import answers
from penstock.server.serving import Serving

__all__ = ["add_routes"]


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`GET /health/live` and `GET /health/ready`."""

    @app.get("/health/live", responses=answers("Live", 403), response_class=Response)
    async def live() -> Response:
        """Whether the process answers; needs no API key."""
        return json_response(200, {"status": "live"})

    @app.get("/health/ready", responses=answers("Ready", 401, 403, 503), response_class=Response)
    async def ready() -> Response:
        """Whether the engine takes work."""
        reason = await _unready(serving)
        if not reason:
            return json_response(200, {"status": "ready", "reason": ""})
        error = error_object(EngineDead(f"The engine is not ready: {reason}"))
        return json_response(503, {"status": "not ready", "reason": reason} | error)


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
