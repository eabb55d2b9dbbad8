"""Requests whose answers are kept as bytes, and read once the load is over.

For loads of hundreds a second beside the server that they try: whatever their sender computes meanwhile, the server
lacks. One connection a request, like `client.ask`, for a tenth to a third of its processor time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import h11

from harness.client import Answer, AnswerReader, head_of, now

__all__ = ["UnreadAnswer", "ask_unread"]


class UnreadAnswer(asyncio.Protocol):
    """The bytes of one answer, with the moment at which each piece came. Confined to its event loop."""

    def __init__(self, request: bytes) -> None:
        self.sent = now()
        self.ended = asyncio.get_running_loop().create_future()
        self.broken = ""
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep a piece."""
        self._pieces.append((now(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is whole, or will never be."""
        self.end(f"{type(exc).__name__}: {exc}" if exc else "")

    def end(self, broken: str) -> None:
        """Nothing more comes; called again, it changes nothing."""
        if not self.ended.done():
            self.broken = broken
            self.ended.set_result(now())

    def read(self) -> Answer:
        """What came of it; to be called when it has ended."""
        answer = Answer(sent=self.sent, ended=self.ended.result(), broken=self.broken)
        reader = AnswerReader(answer, "POST")
        try:
            whole = any(reader.take(data, moment) for moment, data in self._pieces)
            if not whole and not reader.take(b"", answer.ended):
                raise h11.RemoteProtocolError("the answer ended in its middle")
        except h11.RemoteProtocolError as error:
            answer.broken = answer.broken or f"{type(error).__name__}: {error}"
        return answer


async def ask_unread(
    host: str, port: int, path: str, body: Any, headers: Mapping[str, str] | None = None, seconds: float = 600.0
) -> UnreadAnswer:
    """POST a JSON value, and wait for the end of its answer; raises nothing of it.

    Args:
        host: of the server.
        port: of the server.
        path: of the endpoint.
        body: a JSON value.
        headers: beside those that every request has.
        seconds: after which an answer that has not ended counts as hung.
    """
    content = json.dumps(body).encode()
    kept = UnreadAnswer(head_of(path, len(content), {"Connection": "close", **(headers or {})}) + content)
    loop = asyncio.get_running_loop()
    transport = None
    try:
        transport, _ = await loop.create_connection(lambda: kept, host, port)
        await asyncio.wait_for(asyncio.shield(kept.ended), seconds)
    except TimeoutError:
        kept.end(f"no end within {seconds:g} s")
    except OSError as error:
        kept.end(f"{type(error).__name__}: {error}")
    finally:
        if transport is not None:
            transport.close()
    return kept
