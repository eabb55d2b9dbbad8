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
"""How long a process may take to end after its output has ended."""
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Statuses of a worker killed from outside, or by the system when memory runs out; its own limits end it otherwise."""
_READ_BYTES = 1 << 16


class Budget(StrEnum):
    """A budget that an order has exceeded."""

    TIME = "time"
    MEMORY = "memory"
    UNKNOWN = "unknown"
    """A crash: the stack overflowed, or a library ran out of memory."""


class Exceeded(Exception):
    """The order exceeded a budget, which ended the worker; a second try would do the same."""

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.budget = budget


class Lost(Exception):
    """The worker was killed from outside, or does not answer though its CPU time is limited: no fault of the order."""


class WorkerProcess:
    """A running worker. Used by one thread at a time, which must close it after an exception.

    Args:
        program: arguments of the Python interpreter: `("-m", "a.module")`.
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
        self._unsent = hello  # sent with the first order, so that nobody waits for the start

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
            seconds: CPU time that it may take.
            wall_seconds: how long to wait for the answer, on a machine that has other things to do.

        Raises:
            Exceeded: the order takes more time or memory than it may.
            Lost: the worker was killed, or is far too slow.
        """
        deadline = time.monotonic() + wall_seconds
        try:
            self._wait_until(deadline)
            self._stream.sendall(self._unsent + f"{seconds} ".encode() + order + b"\n")
            self._unsent = b""
            answer = self._receive(deadline)
        except OSError:  # the worker is gone, or too slow
            answer = b""
        if answer.endswith(b"\n"):
            return answer
        raise self._why()

    def kill(self) -> None:
        """End the process; safe from any thread."""
        self._process.kill()

    def close(self) -> None:
        """End the process and release its resources."""
        self._process.kill()
        self._process.wait()
        self._stream.close()

    def _receive(self, deadline: float) -> bytes:
        """One line, or the part of it that came before the process ended."""
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
        # An arena for each thread would take 64 MiB of the limited address space.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
