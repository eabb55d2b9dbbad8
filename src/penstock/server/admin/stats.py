"""`GET /stats`: four counts under AstrAI's names, for tools that monitor its scheduler; `/metrics` has more."""

from __future__ import annotations

from fastapi import Response

from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """`GET /stats`."""

    async def stats() -> Response:
        """Sequences so far, tokens generated, sequences running and waiting."""
        health, measured = serving.client.health(), serving.client.measurements()
        body = {
            "total_tasks": sum(count for _, count in measured.finished) + health.running + health.waiting,
            "total_tokens": health.generated_tokens,
            "active_tasks": health.running,
            "waiting_queue": health.waiting,
        }
        return json_response(200, body)

    return (Route("GET", "/stats", stats, answers("Stats", 401)),)
