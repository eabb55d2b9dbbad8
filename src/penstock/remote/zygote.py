"""The zygote as the engine's process sees it: it has imported what computing needs, and forks the runners' processes.

Decides that the exit status of a runner is unknown if its zygote is gone too: it then counts as killed from outside.
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
"""Time for a zygote to answer once it has imported everything: it takes milliseconds, or more on a busy machine."""

log = logging.getLogger(__name__)


def can_fork() -> bool:
    """Whether processes that are not children of this one can be watched: on Linux since 5.3.

    Elsewhere (macOS), it would not be safe either to fork a process that has imported much.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class Zygote:
    """Forks runners' processes; used by one thread at a time.

    Args:
        process: a process that has had no order yet.
    """

    def __init__(self, process: RunnerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """Whether it is known to be gone."""
        return self._process.lost

    def fork(self) -> RunnerProcess:
        """Have a process forked. It can be sent orders at once, and exists once the zygote has imported everything.

        If the zygote is gone, the new process counts as gone too.
        """
        ours, theirs = socket.socketpair()
        with theirs, suppress(RunnerLost):
            self._process.send(messages.Fork(), theirs)
        return RunnerProcess(_Forked(self._process), ours)

    def close(self) -> None:
        """End the zygote, but not the processes that it forked."""
        self._process.close()


class _Forked:
    """The `Handle` of one forked process.

    The zygote reports the process id after the fork; if the zygote ends before, its end counts as the process's end. It
    reaps the process only when asked how it ended, so that the process id is not reused before.

    Args:
        zygote: has been told to fork the process, and has not answered yet.
    """

    def __init__(self, zygote: RunnerProcess) -> None:
        self._zygote = zygote
        self._pid = 0
        self._descriptor: int | None = None  # pidfd of the process while it exists; needs no zygote
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """See `Handle`; waits until the zygote has forked it."""
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
            self._zygote.close()  # do not wait for its imports; a process just forked ends with its connection
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
