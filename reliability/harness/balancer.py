"""A minimal load balancer: it does what nginx or a Kubernetes service does, and nothing more.

It asks each server's readiness ten times a second and hands a request to a server that was ready when last asked. If
that server cannot be reached, or answers 503 before anything was passed on, the next one gets the request, as nginx
does with `proxy_next_upstream error http_503`. Each connection carries one request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

__all__ = ["Balancer"]

_PROBE_SECONDS = 0.1
_PATIENCE_SECONDS = 60.0
"""How long a request waits until any server is ready."""
_READ_BYTES = 1 << 16


@dataclass
class Balancer:
    """Spreads requests over servers, given by port; change `ports` at any time.

    Attributes:
        ready: ports that answered 200 when their readiness was last asked.
        passed_on: requests that went to another server because the first refused them or was gone.
    """

    ports: list[int]
    ready: set[int] = field(default_factory=set)
    passed_on: int = 0
    _turn: count[int] = field(default_factory=count)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen on a free port; yields the URL."""
        probing = asyncio.create_task(self._probe())
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            left = (probing, *self._serving)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _probe(self) -> None:
        while True:
            for port in tuple(self.ports):
                (self.ready.add if await _is_ready(port) else self.ready.discard)(port)
            self.ready.intersection_update(self.ports)
            await asyncio.sleep(_PROBE_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        self._serving.add(task)
        try:
            request = await _whole_request(reader)
            async with asyncio.timeout(_PATIENCE_SECONDS) as patience:
                while not await self._pass(request, writer, patience):
                    await asyncio.sleep(_PROBE_SECONDS / 2)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return  # the client sees a connection that ends without an answer, and counts it
        finally:
            self._serving.discard(task)
            writer.close()

    async def _pass(self, request: bytes, writer: asyncio.StreamWriter, patience: asyncio.Timeout) -> bool:
        """Have a ready server answer; False if none is ready, or the one whose turn it is does not take it."""
        ready = [port for port in self.ports if port in self.ready]
        if not ready:
            return False
        port = ready[next(self._turn) % len(ready)]
        try:
            upstream, sender = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self._refused(port)
            return False
        try:
            sender.write(request)
            first = await upstream.read(_READ_BYTES)
            if not first or re.match(rb"HTTP/1\.1 503 ", first):
                self._refused(port)
                return False
            patience.reschedule(None)
            while first:
                writer.write(first)
                await writer.drain()
                first = await upstream.read(_READ_BYTES)
            return True
        except ConnectionResetError:
            self._refused(port)
            return False
        finally:
            sender.close()

    def _refused(self, port: int) -> None:
        self.ready.discard(port)
        self.passed_on += 1


async def _whole_request(reader: asyncio.StreamReader) -> bytes:
    """Read a head and the body whose length it says."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")


async def _is_ready(port: int) -> bool:
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
