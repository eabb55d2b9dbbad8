"""Which thread goes on while others wait: for how long, and after whom."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["give_way", "go_last", "going_first", "letting_others", "take_short_turns"]

_TURN_SECONDS = 0.001
_NICENESS = 10
"""Steps of the engine go first where processors are few."""
_MOST_SECONDS = 0.05
"""For which somebody gives way: who goes first may never be done."""

_nobody_first = threading.Event()
_nobody_first.set()


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


@contextmanager
def going_first() -> Iterator[None]:
    """Have other threads of this process `give_way` meanwhile.

    A step lets go of Python's lock in each of its many calls of torch, and would wait to get it back each time: for a
    turn of whoever else runs Python, or a compiled call of milliseconds that keeps the lock.
    """
    _nobody_first.clear()
    try:
        yield
    finally:
        _nobody_first.set()


@contextmanager
def letting_others() -> Iterator[None]:
    """Within `going_first`: nobody need give way, because this thread waits or runs compiled code."""
    first = not _nobody_first.is_set()
    _nobody_first.set()
    try:
        yield
    finally:
        if first:
            _nobody_first.clear()


def give_way() -> None:
    """Wait while somebody goes first, but not for long. For long work in Python, between its parts."""
    _nobody_first.wait(_MOST_SECONDS)
