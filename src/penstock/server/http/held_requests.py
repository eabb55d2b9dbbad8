"""Bound the memory of requests in progress: their bodies, and the objects parsed from them.

A body's memory is estimated as it arrives: a JSON value may take two bytes in the body and dozens in memory. A body
that does not fit is refused before it is read if its declared length is too large, otherwise once its estimate is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api_fields.strict_json import weight
from penstock.contract.errors import Overloaded, RefusalCause
from penstock.freed_memory import REST_SECONDS
from penstock.server.http.body import discard_body
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import HttpRefusal, error_response

__all__ = ["HeldBytes", "HoldRequests"]

FREE_BYTES = 64 * 1024
"""Bytes of each request that are not counted: a connection may buffer as much anyway, so ordinary requests always pass.
"""
TOO_LARGE = 413
RETRY_SECONDS = 2


class HeldBytes:
    """Counts the memory that the requests of one application take. Confined to its event loop.

    Args:
        most: limit in bytes for all requests together, beyond the first `FREE_BYTES` of each.
        most_of_a_caller: the same for one API key.
        on_rest: called in a thread once the count has dropped to 0 and stayed there for `REST_SECONDS`.
    """

    def __init__(self, most: int, most_of_a_caller: int, on_rest: Callable[[], None] = lambda: None) -> None:
        self.bytes = 0
        self._on_rest = on_rest
        self._rest: asyncio.TimerHandle | None = None
        self._most = most
        self._most_of_a_caller = most_of_a_caller
        self._callers: Counter[str] = Counter()

    def hold(self, caller: str, more: int) -> None:
        """Count `more` bytes for a caller; a negative number releases them."""
        if not more:  # nearly every request
            return
        self.bytes += more
        self._callers[caller] += more
        if not self._callers[caller]:
            del self._callers[caller]
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if not self.bytes:
            event_loop = asyncio.get_running_loop()
            self._rest = event_loop.call_later(REST_SECONDS, event_loop.run_in_executor, None, self._on_rest)

    def check(self, caller: str, weight: int, held: int = 0) -> None:
        """Check that a request of this weight fits; `held` of its bytes are counted already.

        Raises:
            HttpRefusal: it would not fit even alone.
            Overloaded: it does not fit now.
        """
        wanted = max(0, weight - FREE_BYTES)
        if wanted > self._most_of_a_caller:
            message = "The request's body has too many values: in memory it would take more than this server gives one."
            raise HttpRefusal(TOO_LARGE, message, code="request_too_large")
        more = wanted - held
        if self._callers[caller] + more > self._most_of_a_caller or self.bytes + more > self._most:
            message = "Too many large requests are being served already."
            raise Overloaded(message, retry_after=RETRY_SECONDS, cause=RefusalCause.MEMORY)


class HoldRequests:
    """ASGI middleware; see the module.

    Args:
        held: counts the bytes.
        max_body_bytes: the largest body that is kept; the endpoint that reads a longer one refuses it.
    """

    def __init__(self, app: ASGIApp, held: HeldBytes, max_body_bytes: int) -> None:
        self._app = app
        self._held = held
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(self._held, caller_of(scope).name, self._max_body_bytes, receive, send)
        declared = int(Headers(scope=scope).get("content-length", "0"))
        try:
            self._held.check(request.caller, min(declared, self._max_body_bytes))
        except (Overloaded, HttpRefusal) as refusal:
            await request.refuse()
            await error_response(refusal)(scope, receive, request.send)
            return
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            request.release()


class _Request:
    """One request, and how many of its bytes are counted."""

    def __init__(self, held: HeldBytes, caller: str, max_body_bytes: int, receive: Receive, send: Send) -> None:
        self.caller = caller
        self._held = held
        self._max_body_bytes = max_body_bytes
        self._receive = receive
        self._send = send
        self._size = self._weight = self._counted = 0
        self._refused = False

    async def receive(self) -> Message:
        """Receive a message from the server, and count its body.

        Raises:
            HttpRefusal: as `HeldBytes.check`.
            Overloaded: likewise.
        """
        message = await self._receive()
        body = message.get("body", b"")
        if not body or self._size > self._max_body_bytes:  # a body that is too long is not kept
            return message
        self._size += len(body)
        self._weight += weight(body)
        try:
            self._held.check(self.caller, self._weight, self._counted)
        except (HttpRefusal, Overloaded):
            await self.refuse()
            raise
        self._count(max(0, self._weight - FREE_BYTES))
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the server; close the connection of a request whose body was refused."""
        if self._refused and message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.release()  # before the client reads the end and may send its next request
        await self._send(message)

    async def refuse(self) -> None:
        """Release the counted bytes, and drain the body so that the client sees the response and not a reset."""
        self._refused = True
        self.release()
        await discard_body(self._receive, self._max_body_bytes)

    def release(self) -> None:
        """Release the counted bytes."""
        self._count(0)

    def _count(self, size: int) -> None:
        self._held.hold(self.caller, size - self._counted)
        self._counted = size
