"""Running the application: a listening socket, uvicorn, and an orderly end.

On the first SIGINT or SIGTERM the server takes no more connections and lets running answers finish within a time limit;
on the second it stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from penstock.contract.config import ServerConfig
from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_SERVER_LIMITS, ServerLimits
from penstock.server.http.bounded_protocol import bounded_protocol
from penstock.server.http.stopping import announce_stop

__all__ = ["DRAIN_SECONDS", "End", "Server", "listen", "run"]

DRAIN_SECONDS = DEFAULT_SERVER_LIMITS.drain_seconds
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class End:
    """A server's end, to be brought about by somebody else than the server: before it runs, or while it does."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._come = False

    def now(self) -> None:
        """End the server as after the first signal. May be called from any thread."""
        self._come = True
        if self._server is not None:
            self._server.stop()

    def of(self, server: Server) -> None:
        """This is the server that it is the end of."""
        self._server = server
        if self._come:
            server.stop()


class Server(uvicorn.Server):
    """uvicorn with its own socket, a callback when it is ready, and signals that end it with exit code 0."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        on_ready: Callable[[str], None],
        drain_seconds: int = DRAIN_SECONDS,
        limits: ServerLimits = DEFAULT_SERVER_LIMITS,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(limits, config.max_connections),
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        self._app = app
        self._address = (config.host, config.port)
        self._on_ready = on_ready

    def stop(self) -> None:
        """End as after the first signal. May be called from any thread."""
        self.should_exit = True

    async def listen(self) -> None:
        """Serve until stopped.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        listening = listen(*self._address)
        try:
            await self.serve(sockets=[listening])
        finally:
            listening.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then says the URL."""
        await super().startup(sockets)
        if sockets and not self.should_exit:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; first ends the streams that would never end by themselves."""
        announce_stop(self._app)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take the signals over while serving; unlike uvicorn's, does not kill the process with them afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (a signal handler's signature)
        """First signal: end in order. Second: now."""
        self.force_exit = self.should_exit
        self.should_exit = True


def run(
    app: ASGIApp,
    config: ServerConfig,
    on_ready: Callable[[str], None],
    drain_seconds: int = DRAIN_SECONDS,
    end: End | None = None,
) -> None:
    """Serve `app` until SIGINT or SIGTERM; returns when every answer is finished or `drain_seconds` are over.

    Args:
        app: the application.
        config: where to listen; port 0 takes a free one.
        on_ready: called once with the URL, when connections are accepted.
        drain_seconds: how long running answers may go on after the signal; the rest is then answered with an error.
        end: what else may end it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    server = Server(app, config, on_ready, drain_seconds)
    if end is not None:
        end.of(server)
    asyncio.run(server.listen())


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on an address; the caller closes it.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and with
    # it on, every answer of two writes waits for the client's delayed acknowledgement, 40 ms on Linux.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except socket.gaierror as error:
        listening.close()
        raise ConfigError("host", f"{host!r} is no address of this machine: {error.strerror}") from None
    except OSError as error:
        listening.close()
        raise ConfigError("port", f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listening
