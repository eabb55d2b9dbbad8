"""`GET /stats`: four counts under AstrAI's names, for tools that monitor its scheduler; `/metrics` has more."""

from __future__ import annotations

from fastapi import Response

from penstock.server.delivery.serving import Clients
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(clients: Clients) -> tuple[Route, ...]:
    """`GET /stats`, of all engines together."""

    async def stats() -> Response:
        """Sequences so far, tokens generated, sequences running and waiting."""
        engines = clients()
        health = [each.health() for each in engines]
        running, waiting = sum(each.running for each in health), sum(each.waiting for each in health)
        finished = sum(count for each in engines for _, count in each.measurements().finished)
        body = {
            "total_tasks": finished + running + waiting,
            "total_tokens": sum(each.generated_tokens for each in health),
            "active_tasks": running,
            "waiting_queue": waiting,
        }
        return json_response(200, body)

    return (Route("GET", "/stats", stats, answers("Stats", 401)),)
