"""Around every request: its id, which goes into the answer, and an error object for whatever nothing else caught."""

from __future__ import annotations

import asyncio
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.compat import EXTRA_HEADERS
from penstock.server.http.connection import ClientLeft
from penstock.server.http.failures import ShuttingDown, error_response, log_failure

__all__ = ["Envelope", "new_request_id"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_request_id() -> str:
    """An id for a request whose client gave it none."""
    return f"req-{secrets.token_hex(16)}"


class Envelope:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as the application does."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        request_id = wanted if REQUEST_ID.fullmatch(wanted) else new_request_id()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update({"x-request-id": request_id, **scope.get(EXTRA_HEADERS, {})})
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientLeft:
            return
        except asyncio.CancelledError:  # the server ends before this was answered
            if not started:
                await error_response(ShuttingDown())(scope, receive, send_with_id)
            raise
        except Exception as error:
            log_failure(error, request_id)
            if started:
                return  # an answer cut short: the server closes the connection, so it cannot be taken for complete
            await error_response(error)(scope, receive, send_with_id)
