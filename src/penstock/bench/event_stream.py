"""One POST over a plain socket, answered by server-sent events, each with the time at which its bytes were read.

Written on asyncio's streams instead of an HTTP library, because the load generator shares the machine with the server
that it measures: a pooled client spends several times the CPU time on each small chunk. The server would lack that
time, and its latencies would show it.

Speaks the part of HTTP/1.1 that this needs (RFC 9112: chunked, counted and unbounded bodies), with one connection per
request, closed at the end. So the time to connect is part of the request, as it is for a new client. Events are parsed
according to the standard (WHATWG HTML, section 9.2.6): any line ending, comments, several `data` lines.
"""

from __future__ import annotations

import asyncio
import codecs
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.contract.errors import ConfigError

__all__ = ["EventReader", "HttpFailure", "Target", "stream_events"]

MAX_LINE = 1 << 16
MAX_CHUNK = 1 << 26
MAX_ERROR_BYTES = 1 << 16


class HttpFailure(Exception):
    """The server refused, or did not speak HTTP. The message is short and fit for a table."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    secure: bool
    path: str

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """Parse a base URL such as `http://127.0.0.1:8000/v1`.

        Raises:
            ConfigError: it is not a valid base URL.
        """
        plain = base_url.isascii() and base_url.isprintable() and " " not in base_url
        try:
            parts = urlsplit(base_url)
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise ConfigError("base_url", f"{base_url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username or not plain:
            raise ConfigError("base_url", f"{base_url!r} is not like http://127.0.0.1:8000/v1")
        secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if secure else 80), secure, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EventReader:
    """Takes bytes as they arrive and returns the data of the events that they complete."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""
        self._data: list[str] = []
        self._started = False

    def push(self, piece: bytes) -> list[str]:
        """The data of every event that ends in `piece`."""
        text = self._rest + self._decode(piece)
        if not self._started and text:
            text, self._started = text.removeprefix("\ufeff"), True
        held = "\r" if text.endswith("\r") else ""  # may be the first half of a line ending
        lines = text[: len(text) - len(held)].replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._rest = lines.pop() + held
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: str) -> str | None:
        """The event that `line` ends; None if it ends none."""
        if not line:
            event, self._data = "\n".join(self._data), []
            return event or None
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None


async def stream_events(
    target: Target, path: str, headers: Mapping[str, str], body: bytes, now: Callable[[], float]
) -> AsyncIterator[tuple[float, str]]:
    """POST `body` to `path` below the target and yield (time, data) for each event.

    Raises:
        HttpFailure: the status is not 200, or the answer is not an event stream or breaks off.
        OSError: there is no connection.
    """
    reader = EventReader()
    async with _connect(target) as (incoming, outgoing):
        outgoing.write(_head(target, path, headers, len(body)) + body)
        status, answer_headers = await _read_head(incoming)
        if status != 200:
            raise HttpFailure(f"HTTP {status}: {await _error_text(incoming, answer_headers)}")
        if not answer_headers.get("content-type", "").startswith("text/event-stream"):
            raise HttpFailure(f"answered {answer_headers.get('content-type', 'without a type')}, not an event stream")
        async for piece in _body(incoming, answer_headers):
            moment = now()
            for event in reader.push(piece):
                yield moment, event


@asynccontextmanager
async def _connect(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context = ssl.create_default_context() if target.secure else None
    incoming, outgoing = await asyncio.open_connection(target.host, target.port, ssl=context, limit=MAX_LINE)
    try:
        yield incoming, outgoing
    finally:
        outgoing.close()


def _head(target: Target, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"POST {target.path}{path} HTTP/1.1", f"Host: {target.authority}", "Content-Type: application/json"]
    lines += ["Accept: text/event-stream", f"Content-Length: {length}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_head(incoming: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read status and headers (names in lower case), skipping interim answers."""
    while True:
        version, _, rest = (await _line(incoming)).partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpFailure("the answer is not HTTP/1.1")
        headers = {}
        while line := await _line(incoming):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if not rest.startswith("1"):
            return int(rest[:3]), headers


async def _line(incoming: asyncio.StreamReader) -> str:
    try:
        return (await incoming.readuntil(b"\n")).rstrip(b"\r\n").decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HttpFailure("the connection closed early") from error


async def _body(incoming: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body's bytes as they arrive, without their framing."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        async for piece in _chunks(incoming):
            yield piece
        return
    missing = int(headers["content-length"]) if headers.get("content-length", "").isdigit() else None
    while missing is None or missing > 0:
        piece = await incoming.read(min(MAX_LINE, missing or MAX_LINE))
        if not piece:
            if missing:
                raise HttpFailure("the connection closed early")
            return
        missing = None if missing is None else missing - len(piece)
        yield piece


async def _chunks(incoming: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        digits = (await _line(incoming)).partition(";")[0].strip()
        try:
            size = int(digits, 16)
        except ValueError as error:
            raise HttpFailure("a chunk without a size") from error
        if not 0 <= size <= MAX_CHUNK:
            raise HttpFailure(f"a chunk of {size} bytes")
        if size == 0:
            return
        try:
            yield await incoming.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise HttpFailure("the connection closed early") from error
        await _line(incoming)


async def _error_text(incoming: asyncio.StreamReader, headers: Mapping[str, str]) -> str:
    """The beginning of an error's body, on one line."""
    text = b""
    async for piece in _body(incoming, headers):
        text += piece
        if len(text) > MAX_ERROR_BYTES:
            break
    return " ".join(text.decode("utf-8", errors="replace").split())[:200]
