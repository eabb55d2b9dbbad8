"""Write an HTTP response piece by piece, straight to the ASGI server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Message, Send

__all__ = ["EVENT_HEADERS", "TEXT_HEADERS", "ResponseWriter"]

EVENT_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
TEXT_HEADERS = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class ResponseWriter:
    """Writes one HTTP response, and remembers whether it has started.

    Attributes:
        before: awaited before each message is sent, if set.
        headers: extra headers; those in it when the response starts are sent with the response's own.
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self.before: Callable[[], Awaitable[None]] | None = None
        self.headers: Mapping[str, str] = {}
        self._sink = send

    async def start(self, headers: Mapping[str, str]) -> None:
        """Send status 200 and the headers, once; later calls do nothing."""
        if self.started:
            return
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _raw({**headers, **self.headers})})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, response: Response) -> None:
        """Send a complete response instead."""
        self.started = True
        headers = [*response.raw_headers, *_raw(self.headers)]
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _send(self, message: Message) -> None:
        if self.before is not None:
            await self.before()
        await self._sink(message)


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
