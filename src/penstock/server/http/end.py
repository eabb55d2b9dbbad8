"""How a server ends by somebody else's doing: in order, from any thread; and by force, where order takes too long."""

from __future__ import annotations

import _thread
import logging
import os
import time
from collections.abc import Callable

__all__ = ["End", "LastResort"]

FORCED = 1
"""The exit code of a process that could not end in order."""

log = logging.getLogger("penstock.server")


class End:
    """A server's end, to be brought about by somebody else than the server: before it runs, or while it does."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._come = False

    def now(self) -> None:
        """End the server as after the first signal. May be called from any thread."""
        self._come = True
        if self._stop is not None:
            self._stop()

    def of(self, stop: Callable[[], None]) -> None:
        """This ends the server; it may be called from any thread, and more than once."""
        self._stop = stop
        if self._come:
            stop()


class LastResort:
    """Ends the process if it does not end by itself: a thread that computes for ever can be waited for no longer.

    Args:
        leave: ends the process with an exit code, whatever its threads do.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self._leave = leave
        self._over = False

    def within(self, seconds: float) -> None:
        """The process has so long to end; of several calls, the shortest time counts. May be a signal handler's."""
        _thread.start_new_thread(self._wait, (seconds,))  # a Thread takes locks, which whoever was interrupted may hold

    def cancel(self) -> None:
        """It has ended what it had to."""
        self._over = True

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self._over:
            log.error("the server did not end within %g seconds, so it is ended by force", seconds)
            self._leave(FORCED)
