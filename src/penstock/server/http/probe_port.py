"""A separate port for probes: no key, few connections, and open until the last response on the main port is finished.

It is served by the same event loop as the main port. A thread would answer more reliably but prove less: that loop
writes every token, so a probe that gets no answer rightly reports that the loop is stuck. The port does have its own
connections: clients on the main port, however many, cannot keep a probe out.
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
"""Connections at once; more are answered 429."""

KEEP_ALIVE_SECONDS = 5
LAST_SECONDS = 1
"""Time to finish answering a probe when the server ends."""


@contextlib.asynccontextmanager
async def probes_served(app: ASGIApp, listening: socket.socket, limits: ServerLimits) -> AsyncIterator[None]:
    """Serve `app` on a listening socket until the context ends, then close the socket."""
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
    """uvicorn without signal handlers, which belong to the main server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
