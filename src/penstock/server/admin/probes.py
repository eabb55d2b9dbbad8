"""`GET /health` for people, `GET /health/live` and `GET /health/ready` for orchestrators; see `readiness`.

The event loop that serves requests answers them, on the probe port too: a separate thread would keep reporting that all
is well while that loop is stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fastapi import Response

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import EngineDead
from penstock.contract.ports import Health
from penstock.server.admin.readiness import STOPPING
from penstock.server.http.failures import ShuttingDown, error_object, json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["Condition", "routes"]


class Condition(Protocol):
    """Whether a server works; see `readiness.Readiness`, which tells it of one engine."""

    async def unready(self) -> str:
        """Why it takes no work; "" if it does."""
        ...

    def known_unready(self) -> str:
        """As `unready`, without asking an engine."""
        ...

    def dead(self) -> str:
        """Why nothing can be served until another process is started; "" otherwise."""
        ...


def routes(look: Callable[[], Health], readiness: Condition) -> tuple[Route, ...]:
    """`GET /health`, `GET /health/live` and `GET /health/ready`.

    Args:
        look: returns the health of the engine, or of all engines together.
        readiness: whether the server works.
    """

    async def health() -> Response:
        """Whether the engine is alive, and what it is doing."""
        return _health(look(), readiness)

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


def _health(health: Health, readiness: Condition) -> Response:
    # AstrAI's clients read the last two fields; a server that answers has loaded its model
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
