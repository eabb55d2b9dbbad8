"""`POST /reset_prefix_cache`: forget all cached KV. Needs an admin key if the server has keys."""

from __future__ import annotations

from fastapi import Response

from penstock.server.delivery.serving import Clients
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(clients: Clients) -> tuple[Route, ...]:
    """`POST /reset_prefix_cache`, of all engines."""

    async def reset_prefix_cache() -> Response:
        """Forget all cached KV; running requests keep theirs."""
        for client in clients():
            await client.reset_prefix_cache()
        return json_response(200, {"reset": True})

    return (Route("POST", "/reset_prefix_cache", reset_prefix_cache, answers("Reset", 401, 403, 503)),)
