"""Ctrl-C where it cannot break anything: held while a step is planned and committed, delivered right after.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Between a plan and its commit that would
leave scheduler, runner and text in disagreement. Other threads receive no signals, so nothing is held there; neither is
it where SIGINT has no Python handler.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["interrupts_allowed", "interrupts_held"]


class _Interrupts:
    """Stands in for the program's own handler while interrupts are held."""

    def __init__(self) -> None:
        self._own: Callable[[int, FrameType | None], Any] | None = None
        self._came = False
        self._allowed = False

    @property
    def held(self) -> bool:
        """Whether this thread would be told of an interrupt later."""
        return self._own is not None and not self._allowed and _in_main_thread()

    def hold(self) -> bool:
        """Remember whatever comes from now on; false where nothing can come, or is held already."""
        if self._own is not None or not _in_main_thread():
            return False
        own = signal.getsignal(signal.SIGINT)
        if not callable(own):
            return False
        self._came = False
        signal.signal(signal.SIGINT, self._note)  # first: an interrupt before it must find nothing changed
        self._own = own
        return True

    def deliver(self) -> None:
        """Put the program's own handler back, and tell it what came meanwhile."""
        own, self._own = self._own, None
        if own is None:
            return
        signal.signal(signal.SIGINT, own)
        if self._came:
            own(signal.SIGINT, None)

    def allow(self) -> None:
        """Pass on what came, and what comes from now on."""
        self._allowed = True
        if self._came:
            self._pass_on()

    def forbid(self) -> None:
        """Remember again."""
        self._allowed = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
        if self._allowed:
            self._pass_on()

    def _pass_on(self) -> None:
        self._came = False
        assert self._own is not None, "allowed is only what is held"
        self._own(signal.SIGINT, None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_INTERRUPTS = _Interrupts()
"""One for the process, as signal handlers are; changed by the main thread alone."""


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, an interrupt does not break anything off: it is raised at the end of the outermost such block."""
    outermost = _INTERRUPTS.hold()
    try:
        yield
    finally:
        if outermost:
            _INTERRUPTS.deliver()


@contextmanager
def interrupts_allowed() -> Iterator[None]:
    """Inside `interrupts_held`: what takes long and may be broken off. An interrupt that was held is raised at once."""
    if not _INTERRUPTS.held:
        yield
        return
    try:
        _INTERRUPTS.allow()
        yield
    finally:
        _INTERRUPTS.forbid()
