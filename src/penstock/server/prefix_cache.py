"""`POST /reset_prefix_cache`: forget all cached KV. Needs an admin's key where there are keys."""

from __future__ import annotations

from fastapi import FastAPI, Response

from penstock.server.failures import json_response
from penstock.server.openapi import answers
from penstock.server.serving import Serving

__all__ = ["add_routes"]


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /reset_prefix_cache`."""

    @app.post("/reset_prefix_cache", responses=answers("Reset", 401, 403, 503), response_class=Response)
    async def reset_prefix_cache() -> Response:
        """Forget all cached KV; running requests keep theirs."""
        await serving.client.reset_prefix_cache()
        return json_response(200, {"reset": True})
