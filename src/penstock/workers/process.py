"""One worker as its owner sees it: orders out, answers in, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from penstock.workers.child import OUT_OF_MEMORY

__all__ = ["Budget", "Exceeded", "Lost", "WorkerProcess"]

ENDING_SECONDS = 1.0
"""How long a process may take to end after its output has ended."""
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Statuses of a worker killed from outside, or by the system when memory runs out; its own limits give others."""
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
    """The worker was killed from outside or got no processor time. Not the order's fault: its CPU time is limited."""


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
        self._used: float | None = None  # processor time at the last check; None if not known
        self._unsent = hello  # sent with the first order, so that construction does not wait for the start

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def ask(self, order: bytes, seconds: float, wall_seconds: float) -> bytes:
        """Return the answer to an order.

        Args:
            order: JSON without line breaks.
            seconds: CPU time that it may take.
            wall_seconds: how long the worker may get no processor time, because it is stopped or waits for ever. One
                that gets little, on a busy machine, is not lost.

        Raises:
            Exceeded: the order takes more time or memory than it may.
            Lost: the worker was killed, or got no processor time for that long.
        """
        self._stream.settimeout(wall_seconds)
        self._used = _processor_seconds(self.pid)
        try:
            self._send(self._unsent + f"{seconds} ".encode() + order + b"\n")
            self._unsent = b""
            answer = self._receive()
        except OSError:  # the worker is gone, or got no processor time
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

    def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._stream.send(left) :]
            except TimeoutError:
                self._check_progress()

    def _receive(self) -> bytes:
        """One line, or the part of it that came before the process ended."""
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            try:
                parts.append(self._stream.recv(_READ_BYTES))
            except TimeoutError:
                self._check_progress()
                continue
            if not parts[-1]:
                break
        return b"".join(parts)

    def _check_progress(self) -> None:
        """Raise `TimeoutError` if the process got no processor time since the last check, or if that is unknown."""
        used = _processor_seconds(self.pid)
        if used is None or used == self._used:
            raise TimeoutError
        self._used = used

    def _why(self) -> Exception:
        try:
            status = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return Lost("does not answer")
        if status in _KILLED:
            return Lost("was killed")
        budgets = {-signal.SIGPROF: Budget.TIME, OUT_OF_MEMORY: Budget.MEMORY}
        return Exceeded(budgets.get(status, Budget.UNKNOWN))


def _processor_seconds(pid: int) -> float | None:
    """Processor time that a process has used, in steps of 10 ms; None where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    user, system = stat.rpartition(")")[2].split()[11:13]  # after the name, which may contain anything
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


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
