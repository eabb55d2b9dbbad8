"""Give every response its request id, and answer errors that nothing else caught with an error object."""

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
    """Make an id for a request whose client gave none."""
    return f"req-{secrets.token_hex(16)}"


class Envelope:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer what the application does not catch."""
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
        except asyncio.CancelledError:  # the server stops before the response is complete
            if not started:
                await error_response(ShuttingDown())(scope, receive, send_with_id)
            raise
        except Exception as error:
            log_failure(error, request_id)
            if started:
                return  # cut short: uvicorn closes the connection, so the client cannot take it for complete
            await error_response(error)(scope, receive, send_with_id)
