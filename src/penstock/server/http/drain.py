"""Refusing new work while the server stops: with 503 and `Retry-After`, before anything else looks at the request.

Running answers go on. So does what costs no work: probes, metrics, whatever is only read, and what ends work.
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
        max_body_bytes: most bytes of a refused body that are read, so that the client reads the refusal and no reset.
    """

    def __init__(self, app: ASGIApp, stopping: asyncio.Event, max_body_bytes: int) -> None:
        self._app = app
        self._stopping = stopping
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as the application does, until the server stops."""
        if scope["type"] != "http" or not self._stopping.is_set():
            await self._app(scope, receive, send)
            return
        # So that the client's next request goes to another server.
        last = last_of_its_connection(send)
        if not _is_work(scope):
            await self._app(scope, receive, last)
            return
        await discard_body(receive, self._max_body_bytes)
        await error_response(ShuttingDown())(scope, receive, last)


def _is_work(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path not in ENDS_WORK and not path.endswith(CANCEL)
