"""`GET /version`: which Penstock this is."""

from __future__ import annotations

from fastapi import FastAPI, Response

from penstock.server.failures import json_response
from penstock.server.openapi import answers
from penstock.version import __version__

__all__ = ["add_routes"]


def add_routes(app: FastAPI) -> None:
    """`GET /version`."""

    @app.get("/version", responses=answers("Version", 401, 403), response_class=Response)
    async def version() -> Response:
        """The version of the server."""
        return json_response(200, {"version": __version__})
