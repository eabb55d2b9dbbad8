"""A port of its own for probes: no key, few connections, and open until the last answer on the other port is finished.

It belongs to the same event loop as the port for requests. A thread would answer more surely, and mean less: that loop
writes every token, and a probe that nobody answers says truly that it stands still. What the port has to itself is its
connections: those of clients, however many, cannot keep a probe out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from penstock.contract.limits import ServerLimits
from penstock.server.http.bounded_protocol import bounded_protocol

__all__ = ["PROBE_CONNECTIONS", "probes_served"]

PROBE_CONNECTIONS = 16
"""At once; more are answered 429."""

KEEP_ALIVE_SECONDS = 5
LAST_SECONDS = 1
"""For a probe that is being answered when the server ends."""


@contextlib.asynccontextmanager
async def probes_served(app: ASGIApp, listening: socket.socket, limits: ServerLimits) -> AsyncIterator[None]:
    """Inside, `app` is served on a listening socket, which is closed in the end."""
    server = _ProbeServer(
        uvicorn.Config(
            app,
            http=bounded_protocol(limits, PROBE_CONNECTIONS),
            loop="asyncio",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
        listening.close()


class _ProbeServer(uvicorn.Server):
    """uvicorn without signals, which are the other server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them."""
        yield
