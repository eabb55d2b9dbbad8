"""Report the server's state to systemd by its notify protocol (sd_notify(3), systemd.service(5): `Type=notify`).

Each message is one datagram of `NAME=value` lines to the socket that `$NOTIFY_SOCKET` names: `READY=1` when connections
are accepted, `STOPPING=1` when the server begins to stop, `STATUS=` for people. If the unit has `WatchdogSec=`,
`WATCHDOG=1` is sent twice in that time as long as the engine responds; systemd kills a server that is silent for all of
that time, and starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

__all__ = ["NOBODY", "Notifier", "open_notifier"]

SEND_SECONDS = 1.0
"""How long a service manager that does not read may block the server."""

log = logging.getLogger("penstock.server")


class Notifier:
    """Sends messages to the service manager, if there is one. A message that cannot be sent is only logged.

    Args:
        address: its datagram socket: a path, or `@` and a name in Linux's abstract namespace; "" for no manager.
        watchdog_seconds: how long it waits for a watchdog message; 0 for no watchdog.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._ready = ""

    def ready(self, status: str) -> None:
        """Report that connections are accepted."""
        self._ready = status
        self._send("READY=1", f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        """Report that the server has begun to stop."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def status(self, text: str) -> None:
        """Set the text that `systemctl status` shows."""
        self._send(f"STATUS={_line(text)}")

    @contextlib.asynccontextmanager
    async def watched(self, stuck: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
        """Inside, send watchdog messages while `stuck` returns "". It is called on the event loop that serves."""
        if not (self._address and self._watchdog_seconds):
            yield
            return
        signs = asyncio.create_task(self._give_signs(stuck))
        try:
            yield
        finally:
            signs.cancel()
            await asyncio.gather(signs, return_exceptions=True)

    async def _give_signs(self, stuck: Callable[[], Awaitable[str]]) -> None:
        said = ""
        while True:
            reason = await stuck()
            if not reason:
                self._send("WATCHDOG=1")
            if reason != said:
                self.status(f"not ready: {reason}" if reason else self._ready)
            said = reason
            await asyncio.sleep(self._watchdog_seconds / 2)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.settimeout(SEND_SECONDS)
                sending.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("systemd could not be told %s: %s", lines[0], error)


NOBODY = Notifier()
"""The notifier when there is no service manager."""


def open_notifier(environ: Mapping[str, str]) -> Notifier:
    """The notifier for the service manager that the environment names; `NOBODY` if it names none."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return NOBODY
    if address[0] not in "/@":
        log.warning("NOTIFY_SOCKET is %r, which is no path and no @name: nobody is told", address)
        return NOBODY
    microseconds, wanted = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    watched = microseconds.isdecimal() and wanted in ("", str(os.getpid()))
    return Notifier(address, int(microseconds) / 1e6 if watched else 0.0)


def _line(text: str) -> str:
    return " ".join(text.split())
