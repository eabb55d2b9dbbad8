"""Delays Ctrl-C while a step is planned and committed, and delivers it right after.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Between a plan and its commit, that would
leave scheduler, runner and text in disagreement. Nothing is held in other threads, which receive no signals, or if
SIGINT has no Python handler.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` turns handlers into enums: slower than all else here
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

__all__ = ["interruptible", "interrupts_held"]

T = TypeVar("T")


class _Interrupts:
    """Stands in for the program's own handler while interrupts are held."""

    def __init__(self) -> None:
        self._own: Callable[[int, FrameType | None], Any] | None = None
        self._holder = 0  # the thread
        self._came = False
        self.allowed = False
        """Whether interrupts are passed on although they are held."""

    @property
    def held(self) -> bool:
        """Whether this thread holds interrupts and gets them later."""
        return self._own is not None and not self.allowed and self._holder == threading.get_ident()

    def hold(self) -> bool:
        """Start to hold interrupts; False if none can come or they are held already."""
        if self._own is not None or threading.current_thread() is not threading.main_thread():
            return False
        own = _signal.getsignal(_signal.SIGINT)
        if not callable(own):
            return False
        self._came = self.allowed = False  # an interrupt just before `interruptible` forbids them leaves them allowed
        _signal.signal(_signal.SIGINT, self._note)  # first: an interrupt before it must find nothing changed
        self._own, self._holder = own, threading.get_ident()
        return True

    def deliver(self) -> None:
        """Restore the program's own handler, and pass on an interrupt that came meanwhile."""
        own, self._own = self._own, None
        if own is None:
            return
        _signal.signal(_signal.SIGINT, own)
        if self._came:
            own(_signal.SIGINT, None)

    def allow(self) -> None:
        """Pass on an interrupt that came, and all that come from now on."""
        self.allowed = True
        if self._came:
            self._pass_on()

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        if self.allowed:
            self._pass_on()

    def _pass_on(self) -> None:
        self._came = False
        assert self._own is not None, "allowed is only what is held"
        self._own(_signal.SIGINT, None)


_INTERRUPTS = _Interrupts()
"""One for the process, as signal handlers are; changed only by the main thread."""


class interrupts_held:  # noqa: N801 - a function to those who use it
    """Inside this block an interrupt is held and raised at the end of the outermost such block."""

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        self._outermost = _INTERRUPTS.hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outermost:
            _INTERRUPTS.deliver()


def interruptible(work: Callable[[], T]) -> T:
    """Inside `interrupts_held`: allow interrupts during a long operation; a held one is raised at once."""
    if not _INTERRUPTS.held:
        return work()
    try:
        _INTERRUPTS.allow()
        return work()
    finally:
        _INTERRUPTS.allowed = False  # an interrupt could break off a call, but not this
