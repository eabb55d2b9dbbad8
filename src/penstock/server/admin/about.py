"""`GET /version`: the version of the server."""

from __future__ import annotations

from fastapi import Response

from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route
from penstock.version import __version__

__all__ = ["ROUTES"]


async def version() -> Response:
    """The version of the server."""
    return json_response(200, {"version": __version__})


ROUTES = (Route("GET", "/version", version, answers("Version", 401, 403)),)
