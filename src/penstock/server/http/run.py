"""Run the application: a listening socket, uvicorn, and an orderly shutdown.

On the first SIGINT or SIGTERM the application learns at once that the server is stopping: it is no longer ready and
refuses new work. Connections are still accepted, so that clients get that refusal. Responses in progress may finish
within a time limit, and then end with an error. On the second signal everything ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.limits import DEFAULT_SERVER_LIMITS, ServerLimits
from penstock.contract.server_config import ServerConfig
from penstock.server.http.bounded_protocol import BoundedProtocol, bounded_protocol
from penstock.server.http.end import End
from penstock.server.http.lifecycle import lifecycle_of
from penstock.server.http.listening import ACCEPTED_AT_ONCE, BACKLOG, connections_that_wait, listen
from penstock.server.http.open_files import connections_within_limits
from penstock.server.http.probe_port import probes_served
from penstock.server.http.systemd import NOBODY, Notifier

__all__ = ["DRAIN_SECONDS", "Server", "run"]

DRAIN_SECONDS = DEFAULT_SERVER_LIMITS.drain_seconds
KEEP_ALIVE_SECONDS = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM)

TICK_SECONDS = 0.05
"""How soon a second signal is noticed."""

GOODBYE_SECONDS = 1.0
"""Time for requests in flight when all others are answered, and for cancelled responses to send their error."""

TURNS_UNTIL_TAKEN = 4
"""Turns of the event loop between asyncio accepting a connection and making a transport for it."""

log = logging.getLogger("penstock.server")


class Server(uvicorn.Server):
    """uvicorn with its own socket, a callback when it is ready, and signals that end it with exit code 0.

    Args:
        app: the application; its `Lifecycle`, if it has one, tells it that the server is stopping.
        config: where to listen.
        on_ready: called with the URL when connections are accepted.
        drain_seconds: how long responses in progress may go on after `stop` or a signal.
        limits: limits on headers and on slow clients.
        on_force: called when everything must end at once.
        notifier: tells the service manager.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        on_ready: Callable[[str], None],
        drain_seconds: int = DRAIN_SECONDS,
        limits: ServerLimits = DEFAULT_SERVER_LIMITS,
        on_force: Callable[[], None] = lambda: None,
        notifier: Notifier = NOBODY,
    ) -> None:
        lifecycle = lifecycle_of(app)
        refusals = () if lifecycle is None else (lifecycle.refused, lifecycle.known_refusals)
        super().__init__(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http=bounded_protocol(limits, config.max_connections, *refusals),
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                backlog=ACCEPTED_AT_ONCE,  # asyncio uses one number for this and for the system's queue
            )
        )
        self._app = app
        self._lifecycle = lifecycle
        self._config = config
        self._limits = limits
        self._notifier = notifier
        self._on_ready = on_ready
        self._on_force = on_force
        self._drain_seconds = drain_seconds
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._taking: set[asyncio.Task[object]] = set()

    def stop(self) -> None:
        """Stop as on the first signal. May be called from any thread, and by a signal handler."""
        self.should_exit = True
        if self._event_loop is not None and self._lifecycle is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                self._event_loop.call_soon_threadsafe(self._lifecycle.stopping.set)

    async def listen(self) -> None:
        """Serve until stopped.

        Raises:
            ConfigError: cannot listen on the address.
        """
        self._event_loop = asyncio.get_running_loop()
        config = self._config
        async with contextlib.AsyncExitStack() as around:
            listening = around.enter_context(contextlib.closing(listen(config.host, config.port)))
            if self._lifecycle is not None and config.probe_port:
                probing = listen(config.probe_host, config.probe_port, "probe_")
                await around.enter_async_context(probes_served(self._lifecycle.probes, probing, self._limits))
            if self._lifecycle is not None:
                await around.enter_async_context(self._notifier.watched(self._lifecycle.stuck))
            await self.serve(sockets=[listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then report the URL."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)
        if sockets and not self.should_exit:
            host, port = sockets[0].getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._on_ready(url)
            self._notifier.ready(f"serving at {url}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let responses in progress finish, then close every connection.

        Replaces uvicorn's method, which stops listening first: a client that connected meanwhile would be reset, and
        could not tell a stopping server from a crashed one.
        """
        if self._lifecycle is not None:
            self._lifecycle.stopping.set()
        self._notifier.stopping(f"finishing {len(self.server_state.tasks)} answers")
        end = asyncio.get_running_loop().time() + self._drain_seconds
        await self._finish_answers(end)
        await self._listen_no_more(sockets or [])
        await self._finish_connections(end)
        await self.lifespan.shutdown()

    async def _finish_answers(self, end: float) -> None:
        """Wait until `end` for the responses in progress; cancel those that take longer."""
        running = set(self.server_state.tasks)
        if running:
            log.info("stopping: running answers, %d of them, have %g seconds", len(running), self._drain_seconds)
        for connection in self._connections():
            connection.end_after_answer()
        running = await self._wait(running, end)
        if running:
            log.warning("stopping: %d answers are not finished and end with an error", len(running))
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=GOODBYE_SECONDS)

    async def _wait(self, tasks: set[asyncio.Task[None]], end: float) -> set[asyncio.Task[None]]:
        """Wait for tasks until `end` (event loop time) or a second signal; return the unfinished ones."""
        time = asyncio.get_running_loop().time
        while tasks and not self.force_exit and (left := end - time()) > 0:
            _, tasks = await asyncio.wait(tasks, timeout=min(left, TICK_SECONDS))
        return tasks

    async def _listen_no_more(self, sockets: list[socket.socket]) -> None:
        """Close the listening sockets, but accept the connections that the system has queued for them.

        When asyncio's server closes, it forgets connections that it has accepted but made no transport for.
        """
        event_loop = asyncio.get_running_loop()
        for listening in sockets:
            event_loop.remove_reader(listening)
        for _ in range(TURNS_UNTIL_TAKEN):
            await asyncio.sleep(0)
        for server, listening in zip(self.servers, sockets, strict=True):
            with listening.dup() as last:
                server.close()
                listening.close()
                waiting = list(connections_that_wait(last))
            for connection in waiting:
                task = event_loop.create_task(event_loop.connect_accepted_socket(self._protocol, connection))
                self._taking.add(task)
                task.add_done_callback(self._taking.discard)

    async def _finish_connections(self, end: float) -> None:
        """Answer requests in flight, and give clients time to read what was written to them."""
        time = asyncio.get_running_loop().time
        soon = time() + GOODBYE_SECONDS
        while not self.force_exit:
            for connection in self._connections():
                connection.finish()
            unread = any(connection.transport.get_write_buffer_size() for connection in self._connections())
            if not (self.server_state.connections or self._taking) or time() > (max(soon, end) if unread else soon):
                break
            await asyncio.sleep(TICK_SECONDS)
        for connection in self._connections():
            connection.abort()
        await asyncio.sleep(0)

    def _connections(self) -> list[BoundedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, BoundedProtocol)]

    def _protocol(self) -> asyncio.Protocol:
        """Make the protocol that uvicorn makes for a connection that it accepts itself."""
        make = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. A request that is cancelled because the server stops is not reported as a failure."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self.should_exit:
                raise

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle the signals while serving; unlike uvicorn, do not kill the process with them afterwards."""
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
        """First signal: end gracefully. Second: now."""
        if self.should_exit:
            self.force_exit = True
            self._on_force()
        self.stop()


def run(
    app: ASGIApp,
    config: ServerConfig,
    on_ready: Callable[[str], None],
    drain_seconds: int = DRAIN_SECONDS,
    end: End | None = None,
    on_force: Callable[[], None] = lambda: None,
    notifier: Notifier = NOBODY,
) -> None:
    """Serve `app` until SIGINT or SIGTERM; returns when every response is finished or `drain_seconds` are over.

    Args:
        app: the application.
        config: where to listen; port 0 takes a free one.
        on_ready: called once with the URL, when connections are accepted.
        drain_seconds: how long responses in progress may go on after the signal; the rest then end with an error.
        end: another way to end the server.
        on_force: called on the second signal; lengthy work after that should be cut short.
        notifier: tells the service manager.

    Raises:
        ConfigError: cannot listen on the address, or the process may not open enough files for one connection.
    """
    config = replace(config, max_connections=connections_within_limits(config.max_connections))
    server = Server(app, config, on_ready, drain_seconds, on_force=on_force, notifier=notifier)
    if end is not None:
        end.of(server.stop)
    asyncio.run(server.listen())
