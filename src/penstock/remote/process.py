"""A process of the runner's program as the engine's sees it: started, spoken to, waited for, and ended however it is.

Decides that a process which says nothing for too long has hung, and whether its end came from outside. Does not know
what the messages mean.
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
"""Seconds of a wait: where one took longer, this process stood still too, and it counts as one."""

_DUMP_SECONDS = 1.0
"""For a process that hung to say where."""


class Handle(Protocol):
    """What the system lets one do with a process: the part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int:
        """The system's number for it."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal; nothing where it has ended."""
        ...

    def kill(self) -> None:
        """Send it SIGKILL."""
        ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end, and say how it ended: minus a signal, or an exit status; None where nobody knows.

        Raises:
            subprocess.TimeoutExpired: it runs still.
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
        """The system's number for it."""
        return self._handle.pid

    @property
    def lost(self) -> bool:
        """Whether it was found to be gone."""
        return self._lost

    @property
    def status(self) -> int | None:
        """How it ended, as `Handle.wait` says it; None before."""
        return self._status

    def identify(self) -> None:
        """Find out its number: it has said something, so it is there."""
        _ = self._handle.pid

    def send(self, order: messages.Order, passed: socket.socket | None = None) -> None:
        """Give it an order.

        Args:
            order: what it is to do.
            passed: a socket that it gets with it.

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
            limit: seconds after which a process that says nothing has hung; None: it may take as long as it likes.

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
        """It serves no more: see to it that it ends, and say how it did."""
        self._lost = True
        self._connection.close()
        if hung:
            self._handle.send_signal(signal.SIGABRT)  # faulthandler writes where each of its threads is
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
        """End it, at once: it holds nothing that would be lost."""
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
    """Start a process, which imports what it needs, and then waits for its first order.

    Args:
        program: its command line, to which the descriptor of the connection is added.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 (a program of ours)
            [*program, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is meant for us
        )
    return RunnerProcess(process, ours)


def _how(status: int | None) -> str:
    if status is None:
        return "nobody knows how, for the process that forked it is gone too"
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
