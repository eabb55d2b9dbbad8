"""Decides which thread of a process runs first, and when the others give way to it."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = [
    "NICENESS",
    "give_way",
    "go_last",
    "going_first",
    "letting_others",
    "taking_turns",
    "take_short_turns",
    "wait_for_first",
]

_TURN_SECONDS = 0.0005
NICENESS = 10
"""Niceness of threads that go last, so that the engine's steps go first if processors are few."""
_MOST_SECONDS = 0.05
"""The longest single wait in `give_way`: the thread that goes first may never finish."""

_nobody_first = threading.Event()
_nobody_first.set()
_here = threading.local()


def take_short_turns() -> None:
    """Let threads of this process hold the GIL for half a millisecond at a time, instead of Python's five.

    For a process that does other work besides steps: a step waits for the GIL many times, each time for the turns of
    other threads.
    """
    sys.setswitchinterval(_TURN_SECONDS)


def go_last() -> None:
    """Lower the priority of the calling thread, if the system has thread priorities (Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@contextmanager
def going_first() -> Iterator[None]:
    """While in this context, make other threads of this process wait in `give_way`.

    A step releases the GIL in each of its many torch calls, and would wait each time to get it back: for the turn of
    another thread that runs Python, or for a compiled call of milliseconds that holds the GIL.
    """
    _nobody_first.clear()
    _here.goes_first = True
    try:
        yield
    finally:
        _here.goes_first = False
        _nobody_first.set()


@contextmanager
def letting_others() -> Iterator[None]:
    """Within `going_first`, let other threads run meanwhile, because this thread waits or runs compiled code."""
    first = not _nobody_first.is_set()
    _nobody_first.set()
    try:
        yield
    finally:
        if first:
            _nobody_first.clear()


class _Baton:
    """Held by one thread at a time, in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def take(self) -> None:
        """Wait until no other thread has it, then take it."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def pass_on(self) -> None:
        """Hand it to the next waiting thread, if there is one."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


_baton = _Baton()


@contextmanager
def taking_turns() -> Iterator[None]:
    """Let only one of the threads in this context run at a time; the next one runs when it gives way or leaves.

    Otherwise each of these threads might be in a compiled call of milliseconds that holds the GIL, and the thread that
    goes first would wait for all of them.
    """
    _baton.take()
    _here.has_baton = True
    try:
        yield
    finally:
        _here.has_baton = False
        _baton.pass_on()


def wait_for_first() -> None:
    """Wait while another thread goes first, but not for long, and keep the turn. For the pieces of one part of work.

    So turns change less often: a thread that gets the turn has to wake up, which takes milliseconds at low priority.
    The thread that goes first may do such work itself, and does not wait.
    """
    if not getattr(_here, "goes_first", False):
        _nobody_first.wait(_MOST_SECONDS)


def give_way() -> None:
    """Wait as `wait_for_first` does, and pass the turn on. Call it between the parts of long work in Python."""
    if not getattr(_here, "has_baton", False):
        wait_for_first()
        return
    _baton.pass_on()
    _nobody_first.wait(_MOST_SECONDS)
    _baton.take()
    _nobody_first.wait(_MOST_SECONDS)  # its turn may have come late
