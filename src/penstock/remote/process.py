"""A runner's process as the engine's process sees it: starts it, gives it orders, awaits it, and ends it in any state.

Decides when a silent process counts as hung, and whether a process was killed from outside. Does not know what the
messages mean.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Protocol

from penstock.contract.errors import RunnerLost
from penstock.remote import messages
from penstock.remote.connection import Closed, Connection

__all__ = ["Handle", "RunnerProcess", "start_program"]

_TURN = 1.0
"""Seconds of one wait. A longer wait still counts as one: this process must have been stopped meanwhile too."""

_DUMP_SECONDS = 1.0
"""Time for a hung process to dump its stacks."""


class Handle(Protocol):
    """What can be done with a process: the part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal; does nothing if it has ended."""
        ...

    def kill(self) -> None:
        """Send it SIGKILL."""
        ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; returns minus the signal's number, or the exit status, or None if unknown.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        ...


class RunnerProcess:
    """One process and the connection to it; used by one thread at a time.

    Args:
        handle: the process.
        stream: this end of its connection.
    """

    def __init__(self, handle: Handle, stream: socket.socket) -> None:
        self._handle = handle
        self._connection: Connection[messages.Answer] = Connection(stream, messages.Answer)
        self._lost = False
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._handle.pid

    @property
    def lost(self) -> bool:
        """Whether it is known to be gone."""
        return self._lost

    @property
    def status(self) -> int | None:
        """How it ended, as returned by `Handle.wait`; None before."""
        return self._status

    def identify(self) -> None:
        """Determine the process id, once the process has answered and therefore exists."""
        _ = self._handle.pid

    def send(self, order: messages.Order, passed: socket.socket | None = None) -> None:
        """Give it an order.

        Args:
            order: the order.
            passed: a socket to pass along.

        Raises:
            RunnerLost: it is gone.
        """
        self._check()
        try:
            self._connection.send(order, passed)
        except Closed as error:
            raise self.lose("is gone") from error

    def receive(self, limit: float | None = None) -> messages.Answer:
        """Its next answer.

        Args:
            limit: seconds of silence after which the process counts as hung; None for no limit.

        Raises:
            RunnerLost: it is gone, or has hung.
        """
        self._check()
        turns = 0
        while True:
            try:
                return self._connection.receive(_TURN)
            except TimeoutError:
                turns += 1
                if limit is not None and turns * _TURN >= limit:
                    raise self.lose(f"has said nothing for {turns * _TURN:.0f} s and was ended", hung=True) from None
            except Closed as error:
                raise self.lose("is gone") from error

    def lose(self, what: str, *, hung: bool = False) -> RunnerLost:
        """Give the process up: make sure that it ends, and return an error that says how it ended."""
        self._lost = True
        self._connection.close()
        if hung:
            self._handle.send_signal(signal.SIGABRT)  # its faulthandler dumps the stack of every thread
        try:
            self._status = self._handle.wait(timeout=_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
            return RunnerLost(f"the runner's process {self.pid} {what}")
        return RunnerLost(
            f"the runner's process {self.pid} {what}: {_how(self._status)}",
            killed=not hung and self._status in (None, -signal.SIGKILL),
        )

    def close(self) -> None:
        """Kill it: it holds nothing that would be lost."""
        self._lost = True
        self._connection.close()
        self._end()

    def _end(self) -> None:
        self._handle.kill()
        self._status = self._handle.wait()

    def _check(self) -> None:
        if self._lost:
            raise RunnerLost("the runner's process is gone")


def start_program(program: Sequence[str]) -> RunnerProcess:
    """Start a process, which imports what it needs and then waits for its first order.

    Args:
        program: its command line; the descriptor of the connection is appended.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 (a program of ours)
            [*program, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is meant for this process
        )
    return RunnerProcess(process, ours)


def _how(status: int | None) -> str:
    if status is None:
        return "nobody knows how, for the process that forked it is gone too"
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
