"""The zygote as the engine's process sees it: it has imported what computing needs, and forks those that compute.

Decides that a runner whose end nobody can tell any more, because its zygote is gone too, was ended from outside.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress

from penstock.contract.errors import RunnerLost
from penstock.remote import messages
from penstock.remote.process import RunnerProcess

__all__ = ["Zygote", "can_fork"]

_ANSWER_SECONDS = 5.0
"""For a zygote to answer, once it has imported everything: it takes milliseconds, and a busy machine some more."""

log = logging.getLogger(__name__)


def can_fork() -> bool:
    """Whether processes can be followed that are no children of this one: on Linux since 5.3.

    Elsewhere it would not be safe either to fork a process that has imported much (macOS).
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class Zygote:
    """Forks runners' processes; used by one thread at a time.

    Args:
        process: one that has had no order yet.
    """

    def __init__(self, process: RunnerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The system's number for it."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether it was found to be gone."""
        return self._process.lost

    def fork(self) -> RunnerProcess:
        """Have a process forked. It can be sent orders at once, and is there when the zygote has imported everything.

        Where the zygote is gone, so is the process.
        """
        ours, theirs = socket.socketpair()
        with theirs, suppress(RunnerLost):
            self._process.send(messages.Fork(), theirs)
        return RunnerProcess(_Forked(self._process), ours)

    def close(self) -> None:
        """End it, and not those that it forked."""
        self._process.close()


class _Forked:
    """One forked process, with what `Handle` asks for.

    The zygote says its number once it has forked it; if it ends before, its end is taken for this one's. Only when it
    is asked how a process ended does it have the system forget that, so that nobody else has its number before.

    Args:
        zygote: has been told to fork it, and has not answered.
    """

    def __init__(self, zygote: RunnerProcess) -> None:
        self._zygote = zygote
        self._pid = 0
        self._descriptor: int | None = None  # of the process, while it is there: valid without the zygote too
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """See `Handle`; waits for the zygote to have forked it."""
        self._identify(None)
        return self._pid

    def send_signal(self, sig: int, /) -> None:
        """See `Handle`."""
        self._identify(_ANSWER_SECONDS)
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, sig)

    def kill(self) -> None:
        """See `Handle`."""
        if not self._pid:
            self._zygote.close()  # not to wait for its imports; if it has just forked, the closed connection ends that
            self._end_with_zygote()
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """See `Handle`."""
        self._identify(_ANSWER_SECONDS)
        if self._descriptor is not None:
            end = select.poll()
            end.register(self._descriptor, select.POLLIN)
            if not end.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            os.close(self._descriptor)
            self._descriptor = None
            self._status = self._reap()
        return self._status

    def _identify(self, limit: float | None) -> None:
        if self._pid:
            return
        try:
            answer = self._zygote.receive(limit)
            if not isinstance(answer, messages.Forked):
                raise self._zygote.lose(f"did not fork ({answer})")
        except RunnerLost as error:
            log.warning("the zygote is lost: %s", error)
            self._end_with_zygote()
            return
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(answer.pid)
        self._pid = answer.pid

    def _end_with_zygote(self) -> None:
        self._pid, self._status = self._zygote.pid, self._zygote.status

    def _reap(self) -> int | None:
        try:
            self._zygote.send(messages.Reap(self._pid))
            answer = self._zygote.receive(_ANSWER_SECONDS)
        except RunnerLost as error:
            log.warning("the zygote is lost: %s", error)
            return None
        return answer.status if isinstance(answer, messages.Ended) else None
