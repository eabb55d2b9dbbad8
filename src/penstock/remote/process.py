"""A runner's process as the engine's sees it: started, spoken to, waited for, and ended however it is.

Decides that a process which says nothing for too long has hung, and whether its end came from outside. Does not know
what the messages mean.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Sequence

from penstock.contract.errors import RunnerLost
from penstock.remote import messages
from penstock.remote.connection import Closed, Connection

__all__ = ["RunnerProcess"]

_TURN = 1.0
"""Seconds of a wait: where one took longer, this process stood still too, and it counts as one."""

_DUMP_SECONDS = 1.0
"""For a process that hung to say where."""


class RunnerProcess:
    """One process and the connection to it; used by one thread at a time.

    It imports what it needs as soon as it is there, and then waits for its first order.

    Args:
        program: its command line, to which the descriptor of the connection is added.
    """

    def __init__(self, program: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (a program of ours)
                [*program, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is meant for us
            )
        self._connection: Connection[messages.Answer] = Connection(ours, messages.Answer)
        self._lost = False

    @property
    def pid(self) -> int:
        """The system's number for it."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether it was found to be gone."""
        return self._lost

    def send(self, order: messages.Order) -> None:
        """Give it an order.

        Raises:
            RunnerLost: it is gone.
        """
        if self._lost:
            raise RunnerLost("the runner's process is gone")
        try:
            self._connection.send(order)
        except Closed as error:
            raise self.lose("is gone") from error

    def receive(self, limit: float | None = None) -> messages.Answer:
        """Its next answer.

        Args:
            limit: seconds after which a process that says nothing has hung; None: it may take as long as it likes.

        Raises:
            RunnerLost: it is gone, or has hung.
        """
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
            self._process.send_signal(signal.SIGABRT)  # faulthandler writes where each of its threads is
        try:
            status = self._process.wait(timeout=_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return RunnerLost(f"the runner's process {self.pid} {what}")
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return RunnerLost(
            f"the runner's process {self.pid} {what}: {how}", killed=not hung and status == -signal.SIGKILL
        )

    def close(self) -> None:
        """End it, at once: it holds nothing that would be lost."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
