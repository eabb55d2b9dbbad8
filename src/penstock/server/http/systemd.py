"""Telling systemd how the server is, by its notify protocol (sd_notify(3), systemd.service(5): `Type=notify`).

Each message is one datagram of `NAME=value` lines to the socket that `$NOTIFY_SOCKET` names: `READY=1` when connections
are taken, `STOPPING=1` when the server begins to stop, `STATUS=` for people. Where the unit has `WatchdogSec=`,
`WATCHDOG=1` follows at half that time, as long as the engine answers: systemd kills a server that has been silent for
the whole of it, and starts another.
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
"""How long a manager that does not read may hold the server up."""

log = logging.getLogger("penstock.server")


class Notifier:
    """Sends messages to the service manager, if there is one. A message that cannot be sent is logged, no more.

    Args:
        address: of its datagram socket: a path, or a name in Linux' abstract namespace after `@`; "" for nobody.
        watchdog_seconds: how long it waits for a sign of life; 0 if it does not.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._ready = ""

    def ready(self, status: str) -> None:
        """Connections are taken."""
        self._ready = status
        self._send("READY=1", f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        """The server has begun to stop."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def status(self, text: str) -> None:
        """Something for people, for `systemctl status` to show."""
        self._send(f"STATUS={_line(text)}")

    @contextlib.asynccontextmanager
    async def watched(self, stuck: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
        """Inside, give signs of life as long as `stuck` says ""; it is asked on the event loop that serves."""
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
"""There is no service manager."""


def open_notifier(environ: Mapping[str, str]) -> Notifier:
    """Whoever the environment says started this process and wants to be told."""
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
