"""Ctrl-C ends a command within two seconds, with one word and exit code 130, whatever the command is doing.

Python raises KeyboardInterrupt between two bytecodes of the main thread. That is not enough, for four reasons: a call
into compiled code (a large model's step, loading its weights) returns late; a library that is being imported turns the
interrupt into an error of its own; an interrupt inside a destructor is printed and forgotten; an interrupt after the
last bytecode before a wait for a socket is not noticed until the wait is over. So a thread reads every Ctrl-C from the
signal itself. It wakes the main thread, and ends the process if the command has not ended in time.

A command that handles Ctrl-C itself says so with `interrupts_taken`. A command that writes under a temporary name says
so with `leaves_nothing`; then SIGTERM ends it in the same way, with exit code 143.
"""

from __future__ import annotations

import _thread
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

__all__ = [
    "INTERRUPTED",
    "TERMINATED",
    "ends_when_interrupted",
    "interrupts_taken",
    "forget_uncaught_interrupt",
    "leaves_nothing",
    "say_interrupted",
    "wakeups_lent",
]

INTERRUPTED = 130
"""Exit code after SIGINT: 128 plus the signal's number, as in shells."""

TERMINATED = 143
"""Exit code after SIGTERM."""

GRACE_SECONDS = 1.5
"""How long a command may take to end by itself: less than two seconds, including the end of the process."""

AGAIN_SECONDS = 0.01
"""Delay before a lost interrupt is raised again: the destructor that swallowed it has ended by then."""

WAKE_SECONDS = (0.01, 0.1, 0.5)
"""Delays between wake-ups of the main thread: the first one usually suffices, the others are for a stalled machine."""

WAKE_SIGNAL = signal.SIGURG
"""A signal that nothing here uses, and that is ignored by default."""


class _Watch:
    """Ends the process some time after a Ctrl-C that the command did not take. One per process."""

    def __init__(self) -> None:
        self.taken = 0
        self.unfinished: Path | None = None
        self.came = False
        self.over = False
        self.said = False
        self.speaking = threading.Lock()
        self.caught_up = threading.Event()

    def listen(self, reader: int) -> None:
        """Read signal numbers as they arrive, until the pipe is closed."""
        while numbers := os.read(reader, 64):
            if signal.SIGINT in numbers:
                threading.Thread(target=_wake_main_thread, daemon=True).start()
                if not self.taken:
                    self.came = True
                    self.caught_up.set()
                    self._end_late(INTERRUPTED)
            if signal.SIGTERM in numbers and self.unfinished is not None:
                threading.Thread(target=self._end_late, args=(TERMINATED,), daemon=True).start()
            self.caught_up.set()
        os.close(reader)

    def _end_late(self, code: int) -> None:
        time.sleep(GRACE_SECONDS)
        if self.over:
            return
        if code == INTERRUPTED:
            say_interrupted(below="\r\n" if sys.stderr.isatty() else "")
        if self.unfinished is not None:
            _remove(self.unfinished)
        os._exit(code)


_WATCH = _Watch()


def _wake_main_thread() -> None:
    """Interrupt a system call that the main thread began after Ctrl-C arrived, so that Python checks for signals."""
    for seconds in WAKE_SECONDS:
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)


@contextmanager
def ends_when_interrupted() -> Iterator[None]:
    """Inside, the process ends soon after a Ctrl-C, whether or not the running code cooperates.

    Raises:
        KeyboardInterrupt: a Ctrl-C came, even if the running code turned it into another error. Further Ctrl-C are
            ignored from then on.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield
        return
    _WATCH.came = _WATCH.over = _WATCH.said = False
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_WATCH.listen, args=(reader,), name="interrupts", daemon=True).start()
    earlier, earlier_hook = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), sys.unraisablehook
    earlier_woken = signal.signal(WAKE_SIGNAL, lambda *_: None)  # without a handler it would interrupt no system call
    sys.unraisablehook = _raise_again
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | click.Abort) and not _hears_of_one(writer):
            _WATCH.over = True
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt from None  # the watch stays active: the interpreter has yet to exit
    else:
        _WATCH.over = True
    finally:
        sys.unraisablehook = earlier_hook
        signal.set_wakeup_fd(earlier)
        signal.signal(WAKE_SIGNAL, earlier_woken)
        os.close(writer)


def forget_uncaught_interrupt() -> None:
    """Keep Python from killing itself with SIGINT at the end, after an interrupt that was caught.

    An interrupt that passed through an `exec` of text, such as a dataclass's, counts as uncaught until the next `exec`
    of text; `python -m` then ends by the signal, whatever the exit code (CPython 3.11, `run_eval_code_obj`).
    """
    exec("")  # noqa: S102


def _hears_of_one(writer: int) -> bool:
    """Whether a Ctrl-C has come; waits for the watch to read all signals so far."""
    _WATCH.caught_up.clear()  # clear before reading `came`: a signal in between sets it again
    if not _WATCH.came:
        os.write(writer, bytes(1))  # 0 is no signal's number
        _WATCH.caught_up.wait(GRACE_SECONDS)
    return _WATCH.came


def _raise_again(lost: sys.UnraisableHookArgs) -> None:
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    threading.Timer(AGAIN_SECONDS, _thread.interrupt_main).start()


@contextmanager
def interrupts_taken() -> Iterator[None]:
    """Inside, the command itself handles Ctrl-C."""
    _WATCH.taken += 1
    try:
        yield
    finally:
        _WATCH.taken -= 1


@contextmanager
def wakeups_lent() -> Iterator[None]:
    """Inside, a library may take over Python's wake-up pipe for signals; afterwards the watch gets it back.

    An asyncio loop takes it for its first signal handler, and does not restore it.
    """
    earlier = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)


@contextmanager
def leaves_nothing(unfinished: Path) -> Iterator[None]:
    """Inside, an unfinished file or directory has this name; it is removed before the process is ended by force.

    Raises:
        SystemExit: SIGTERM came. The writer removes unfinished output while this propagates, as after a Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads get no signals
        yield
        return
    _WATCH.unfinished = unfinished
    earlier = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
        _WATCH.unfinished = None


def _terminated(*_: object) -> None:
    sys.exit(TERMINATED)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def say_interrupted(below: str = "") -> None:
    """Write `interrupted` once, after `below`, unbuffered."""
    with _WATCH.speaking:  # the watch may write it at the same time
        if _WATCH.said:
            return
        _WATCH.said = True
        try:
            os.write(sys.stderr.fileno(), f"{below}interrupted\n".encode())
        except (OSError, ValueError):  # standard error cannot be written
            return
