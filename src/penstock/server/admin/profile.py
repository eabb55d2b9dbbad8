"""`POST /start_profile` and `POST /stop_profile`, as in vLLM and SGLang. Need an admin key if the server has keys.

The body is not read: the load generators of both systems send one, each in its own form.
"""

from __future__ import annotations

from fastapi import Response

from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /start_profile` and `POST /stop_profile`."""

    async def start_profile() -> Response:
        """Record every step from now on, for a profile in the folder that --profile-dir names."""
        await serving.client.start_profile()
        return json_response(200, {"profiling": True, "files": []})

    async def stop_profile() -> Response:
        """End the profile and write it; lists the names of its files."""
        files = await serving.client.stop_profile()
        return json_response(200, {"profiling": False, "files": list(files)})

    given = answers("Profile", 400, 401, 403, 500, 503)
    return (
        Route("POST", "/start_profile", start_profile, given),
        Route("POST", "/stop_profile", stop_profile, given),
    )
