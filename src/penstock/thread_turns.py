"""Which thread goes on while others wait: for how long, and after whom."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["NICENESS", "give_way", "go_last", "going_first", "letting_others", "taking_turns", "take_short_turns"]

_TURN_SECONDS = 0.001
NICENESS = 10
"""Of whoever goes last. Steps of the engine go first where processors are few."""
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
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id() if native_id is None else native_id, NICENESS)


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


class _Baton:
    """What one thread has at a time: whoever came first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def take(self) -> None:
        """Wait until nobody else has it."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def pass_on(self) -> None:
        """Let the next one have it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


_baton = _Baton()
_here = threading.local()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Of all threads that are within this, one goes on at a time; the next one when it gives way.

    Each thread that runs Python may have a compiled call of milliseconds under way that keeps Python's lock, and who
    goes first waits for all of them.
    """
    _baton.take()
    _here.has_baton = True
    try:
        yield
    finally:
        _here.has_baton = False
        _baton.pass_on()


def give_way() -> None:
    """Wait while somebody goes first, but not for long. For long work in Python, between its parts."""
    if not getattr(_here, "has_baton", False):
        _nobody_first.wait(_MOST_SECONDS)
        return
    _baton.pass_on()
    _nobody_first.wait(_MOST_SECONDS)
    _baton.take()
    _nobody_first.wait(_MOST_SECONDS)  # its turn may have come late
