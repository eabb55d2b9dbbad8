"""Call an application without a socket: one POST, one complete response, in this process and on this event loop.

The response is, byte for byte, what an HTTP client would get.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

__all__ = ["Answer", "post"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP response."""

    status: int
    headers: Headers
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Post a JSON body to `path` of `app`. Cancelling the call is the same as closing the connection."""
    asked = False
    pieces: list[bytes] = []
    started: Message = {}

    async def receive() -> Message:
        nonlocal asked
        if asked:  # the client never leaves
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            pieces.append(message.get("body", b""))

    await app(_scope(path, len(body)), receive, send)
    return Answer(started["status"], Headers(raw=started["headers"]), b"".join(pieces))


def _scope(path: str, length: int) -> Message:
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(length)}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
