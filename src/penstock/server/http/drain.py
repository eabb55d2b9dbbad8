"""Refuse new work while the server stops: 503 with `Retry-After`, before the body is parsed.

Responses in progress go on. Requests that cost no work are still served: probes, metrics, reads, and requests that end
work.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.http.body import discard_body
from penstock.server.http.connection import last_of_its_connection
from penstock.server.http.failures import ShuttingDown, error_response

__all__ = ["RefuseNewWork"]

ENDS_WORK = frozenset({"/abort_requests", "/stop_profile"})
CANCEL = "/cancel"


class RefuseNewWork:
    """ASGI middleware; see the module.

    Args:
        stopping: set when the server begins to stop.
        max_body_bytes: how much of a refused body is read, so that the client sees the refusal and not a reset.
    """

    def __init__(self, app: ASGIApp, stopping: asyncio.Event, max_body_bytes: int) -> None:
        self._app = app
        self._stopping = stopping
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 503 to new work once the server stops."""
        if scope["type"] != "http" or not self._stopping.is_set():
            await self._app(scope, receive, send)
            return
        # Close the connection, so that the client's next request goes to another server.
        last = last_of_its_connection(send)
        if not _is_work(scope):
            await self._app(scope, receive, last)
            return
        await discard_body(receive, self._max_body_bytes)
        await error_response(ShuttingDown())(scope, receive, last)


def _is_work(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path not in ENDS_WORK and not path.endswith(CANCEL)
