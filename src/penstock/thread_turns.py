"""Which thread goes on while others wait: for how long, and after whom."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

__all__ = ["go_last", "take_short_turns"]

_TURN_SECONDS = 0.001
_NICENESS = 10
"""Steps of the engine go first where processors are few."""


def take_short_turns() -> None:
    """Let threads of this process take turns of a millisecond, in place of Python's five.

    For a process that computes steps and does other work beside them: a step has many moments at which it waits for its
    turn, at each of them for the turns of others.
    """
    sys.setswitchinterval(_TURN_SECONDS)


def go_last(native_id: int | None = None) -> None:
    """Lower the priority of one thread, by default of this one, where the system has priorities of threads (Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id() if native_id is None else native_id, _NICENESS)
