"""Everything around the application that a process serves: keys, log, service manager, observers, signals, shutdown."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from penstock import server
from penstock.contract.server_config import ServerConfig

__all__ = ["ServerProcess"]

FORCED_SECONDS = 1.5
"""How long the server may take to end after a second signal."""

CLOSE_SECONDS = 10.0
"""How long closing may take once nothing is served: a hung step would prevent an engine from closing."""


class ServerProcess:
    """This process as a server.

    Args:
        options: the operator's options.
        announce: called with each line of the start report.

    Raises:
        ConfigError: the keys cannot be read.
    """

    def __init__(self, options: ServerConfig, announce: Callable[[str], None]) -> None:
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            faulthandler.enable()  # dump stacks after a crash, or when systemd's watchdog ends the process
        self.access = server.open_access(options, os.environ)
        server.configure_logging(options.log_format)
        self._options = options
        self._announce = announce
        self._notifier = server.open_notifier(os.environ)
        self._end = server.End()
        self._last_resort = server.LastResort()

    def say(self, line: str) -> None:
        """Announce a line, and tell the service manager."""
        with server.unread_is_fine(sys.stdout):
            self._announce(line)
        self._notifier.status(line)

    def end(self) -> None:
        """End as on the first signal. May be called from any thread, even before `run`."""
        self._end.now()

    @contextmanager
    def observers(self, model: str) -> Iterator[list[Callable[[Any], None]]]:
        """Functions to call with each request that is over: the request log and spans, if the operator wants them.

        Args:
            model: the name of the model in spans; "" for the name that the request used.
        """
        options = self._options
        observers: list[Callable[[Any], None]] = [server.log_request] if options.log_requests else []
        if not options.otlp_traces_endpoint:
            yield observers
            return
        spans = server.open_spans(options.otlp_traces_endpoint, model)
        try:
            yield [*observers, spans]
        finally:
            spans.close()

    def run(self, app: ASGIApp, endpoint: str, on_ready: Callable[[str], None]) -> None:
        """Serve `app` until the process is asked to end, or `end` is called.

        Args:
            app: the application.
            endpoint: the path that most callers want, for the start report.
            on_ready: called with the URL once connections are accepted.

        Raises:
            ConfigError: the server cannot listen on the address.
        """
        options = self._options

        def ready(url: str) -> None:
            self.say(f"listening {url} (POST {url}{endpoint})")
            if options.probe_port:
                self.say(f"probes    {options.probe_host}, port {options.probe_port} (GET /health/ready)")
            on_ready(url)

        server.run(
            app,
            options,
            on_ready=ready,
            drain_seconds=options.drain_timeout,
            end=self._end,
            on_force=partial(self._last_resort.within, FORCED_SECONDS),
            notifier=self._notifier,
        )

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Inside, engines are closed: the process ends by force if that takes too long."""
        self._last_resort.within(CLOSE_SECONDS)
        yield
        self._last_resort.cancel()
