"""The zygote as the engine's process sees it: it has imported what computing needs, and forks the runners' processes.

Runners of several models, each with a thread of its own, may share a zygote (`Nursery`).
Decides that the exit status of a runner is unknown if its zygote is gone too: it then counts as killed from outside.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from penstock.contract.errors import RunnerLost
from penstock.remote import messages
from penstock.remote.process import RunnerProcess, start_program

__all__ = ["Nursery", "can_fork"]

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


class Nursery:
    """Forks runners' processes from a zygote, and starts another zygote if the first is gone. Used by any thread.

    Args:
        program: the command line of a zygote.
        process: a process of this program that has had no order yet, to be the first zygote; None to start one.
    """

    def __init__(self, program: Sequence[str], process: RunnerProcess | None = None) -> None:
        self._program = tuple(program)
        self._zygote = Zygote(process or start_program(self._program))
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process id of the zygote."""
        return self._zygote.pid

    def fork(self) -> RunnerProcess:
        """See `Zygote.fork`."""
        with self._lock:
            if self._zygote.lost:  # its end is noticed only when it is sent something
                self._zygote = Zygote(start_program(self._program))
            return self._zygote.fork()

    def close(self) -> None:
        """End the zygote, but not the processes that it forked."""
        with self._lock:
            self._zygote.close()


class Zygote:
    """One zygote; used by any thread.

    Args:
        process: a process that has had no order yet.
    """

    def __init__(self, process: RunnerProcess) -> None:
        self._process = process
        self._lock = threading.Lock()  # guards the connection: answers come in the order of the orders
        self._unknown: deque[_Forked] = deque()  # forked or being forked; process ids not received yet

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
        forked = _Forked(self)
        with self._lock, theirs, suppress(RunnerLost):
            self._unknown.append(forked)
            self._process.send(messages.Fork(), theirs)
        return RunnerProcess(forked, ours)

    def identify(self, forked: _Forked, limit: float | None) -> None:
        """Wait for the process id of `forked`.

        Args:
            forked: a process that this zygote forks.
            limit: seconds of silence after which the zygote counts as hung; None for no limit.

        Raises:
            RunnerLost: the zygote is gone, or has hung.
        """
        with self._lock:
            while not forked.known:
                self._identify_next(limit)

    def status_of(self, pid: int) -> int | None:
        """Reap a forked process that has ended; return how, as `Handle.wait`. Raises as `identify` does."""
        with self._lock:
            while self._unknown:
                self._identify_next(_ANSWER_SECONDS)
            self._process.send(messages.Reap(pid))
            answer = self._process.receive(_ANSWER_SECONDS)
        return answer.status if isinstance(answer, messages.Ended) else None

    @property
    def status(self) -> int | None:
        """How the zygote itself ended, as in `Handle.wait`; None before."""
        return self._process.status

    def _identify_next(self, limit: float | None) -> None:
        answer = self._process.receive(limit)
        if not isinstance(answer, messages.Forked):
            raise self._process.lose(f"did not fork ({answer})")
        self._unknown.popleft().be(answer.pid)

    def close(self) -> None:
        """End the zygote, but not the processes that it forked."""
        self._process.close()


class _Forked:
    """The `Handle` of one forked process.

    The zygote reports the process id after the fork; if the zygote ends first, its end counts as the process's end. It
    reaps the process only when asked how the process ended, so that the process id is not reused before that.

    Args:
        zygote: the zygote that forks the process.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._pid = 0
        self._descriptor: int | None = None  # pidfd of the process while it exists; needs no zygote
        self._status: int | None = None

    @property
    def known(self) -> bool:
        """Whether its process id is known, or its zygote's end counts as its own."""
        return self._pid != 0

    def be(self, pid: int) -> None:
        """Take the process id that the zygote reported."""
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
        self._pid = pid

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
            self._zygote.identify(self, limit)
        except RunnerLost as error:
            log.warning("the zygote is lost: %s", error)
            self._end_with_zygote()

    def _end_with_zygote(self) -> None:
        self._pid, self._status = self._zygote.pid, self._zygote.status

    def _reap(self) -> int | None:
        try:
            return self._zygote.status_of(self._pid)
        except RunnerLost as error:
            log.warning("the zygote is lost: %s", error)
            return None
