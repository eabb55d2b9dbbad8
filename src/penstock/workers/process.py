"""One worker as its owner sees it: orders out, answers in, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum

from penstock.workers.child import OUT_OF_MEMORY

__all__ = ["Budget", "Exceeded", "Lost", "WorkerProcess"]

ENDING_SECONDS = 1.0
"""Between the end of a process's output and its own."""
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""By somebody else, or by the system for want of memory; a worker's own limits end it otherwise."""
_READ_BYTES = 1 << 16


class Budget(StrEnum):
    """What an order may use so much of."""

    TIME = "time"
    MEMORY = "memory"
    UNKNOWN = "unknown"
    """A crash: of the stack, or of a library that is out of memory."""


class Exceeded(Exception):
    """The order took more than it may, and the worker ended by it: asked again, it would do the same."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.budget = budget


class Lost(Exception):
    """Somebody killed the worker, or it does not answer though its processor time is limited: no fault of the order."""


class WorkerProcess:
    """A running worker. One thread at a time; whoever gets an exception from it closes it.

    Args:
        program: what the Python interpreter is to run: `("-m", "a.module")`.
        hello: the first line, for the worker's `begin`.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, program: Sequence[str], hello: bytes) -> None:
        self._stream, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _started(program, theirs)
            except BaseException:
                self._stream.close()
                raise
        self._unsent = hello  # sent with the first order: nobody waits until the process has started

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def ask(self, order: bytes, seconds: float, wall_seconds: float) -> bytes:
        """The answer to an order.

        Args:
            order: JSON without line breaks.
            seconds: of processor time that it may take.
            wall_seconds: until when an answer must have come, on a machine that has other things to do.

        Raises:
            Exceeded: it takes more time or memory than it may.
            Lost: the worker was killed, or is far too slow.
        """
        deadline = time.monotonic() + wall_seconds
        try:
            self._wait_until(deadline)
            self._stream.sendall(self._unsent + f"{seconds} ".encode() + order + b"\n")
            self._unsent = b""
            answer = self._receive(deadline)
        except OSError:  # nobody is there, or too slow
            answer = b""
        if answer.endswith(b"\n"):
            return answer
        raise self._why()

    def kill(self) -> None:
        """End the process; safe from any thread."""
        self._process.kill()

    def close(self) -> None:
        """End the process and let go of it."""
        self._process.kill()
        self._process.wait()
        self._stream.close()

    def _receive(self, deadline: float) -> bytes:
        """A line, or what came of it until the process ended."""
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            self._wait_until(deadline)
            parts.append(self._stream.recv(_READ_BYTES))
            if not parts[-1]:
                break
        return b"".join(parts)

    def _wait_until(self, deadline: float) -> None:
        self._stream.settimeout(max(deadline - time.monotonic(), 0.001))

    def _why(self) -> Exception:
        try:
            status = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return Lost("does not answer")
        if status in _KILLED:
            return Lost("was killed")
        budgets = {-signal.SIGPROF: Budget.TIME, OUT_OF_MEMORY: Budget.MEMORY}
        return Exceeded(budgets.get(status, Budget.UNKNOWN))


def _started(program: Sequence[str], stream: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 (our own program)
        [sys.executable, *program],
        stdin=stream.fileno(),
        stdout=stream.fileno(),
        stderr=subprocess.DEVNULL,  # a panic's report; the exit status says what the owner needs
        start_new_session=True,  # a terminal's Ctrl-C is meant for us
        # An arena for each thread would be 64 MiB of the address space that is limited.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
