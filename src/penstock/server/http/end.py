"""End a server from outside: gracefully, from any thread; or by force, if that takes too long."""

from __future__ import annotations

import _thread
import logging
import os
import time
from collections.abc import Callable

__all__ = ["End", "LastResort"]

FORCED = 1
"""The exit code of a process that did not end gracefully."""

log = logging.getLogger("penstock.server")


class End:
    """A handle to end a server from outside, before or while it runs."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._come = False

    def now(self) -> None:
        """End the server as on the first signal. May be called from any thread."""
        self._come = True
        if self._stop is not None:
            self._stop()

    def of(self, stop: Callable[[], None]) -> None:
        """Set the function that ends the server. It may be called at once, from any thread, and repeatedly."""
        self._stop = stop
        if self._come:
            stop()


class LastResort:
    """Ends the process by force if it does not end in time, for example because a thread computes for ever.

    Args:
        leave: ends the process with an exit code, whatever its threads do.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self._leave = leave
        self._over = False

    def within(self, seconds: float) -> None:
        """Force an exit after `seconds`; of several deadlines, the earliest counts. Safe in a signal handler."""
        _thread.start_new_thread(self._wait, (seconds,))  # a Thread takes locks, which the interrupted code may hold

    def cancel(self) -> None:
        """Drop every deadline: the server has ended gracefully."""
        self._over = True

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self._over:
            log.error("the server did not end within %g seconds, so it is ended by force", seconds)
            self._leave(FORCED)
