"""Keeps workers of one program: starts them when needed, reuses them for later orders, replaces those that ended."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from penstock.contract.errors import Unavailable
from penstock.workers.process import Exceeded, Lost, WorkerProcess

__all__ = ["WorkerPool"]

TRIES = 2


class WorkerPool:
    """Has workers answer orders. Safe to call from several threads; each thread that asks uses a process: see `Turns`.

    Args:
        what: what the workers do, for errors: "compiles grammars".
        program: arguments of the Python interpreter.
        hello: a JSON value for each worker's `begin`.
        wall_seconds: how long a worker with an order may get no processor time. A last resort: the limit on CPU time
            does not end a stopped process, because that uses none.
    """

    def __init__(self, what: str, program: Sequence[str], hello: Any = None, *, wall_seconds: float) -> None:
        self._what = what
        self._program = tuple(program)
        self._hello = json.dumps(hello).encode() + b"\n"
        self._wall_seconds = wall_seconds
        self._lock = threading.Lock()  # guards what follows
        self._idle: list[WorkerProcess] = []
        self._workers: set[WorkerProcess] = set()
        self._closed = False
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _close_all, self._workers, self._owner)

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the current processes."""
        with self._lock:
            return tuple(sorted(worker.pid for worker in self._workers))

    def start(self) -> None:
        """Start a worker if none is idle; does not wait for it."""
        with self._lock:
            if not self._idle and not self._closed:
                self._idle.append(self._new())

    def ask(self, order: Any, seconds: float) -> Any:
        """Return the answer to an order, both JSON values, within `seconds` of CPU time.

        If its worker is lost, the order goes to another one, once.

        Raises:
            Exceeded: the order takes more time or memory than it may.
            Unavailable: two workers were killed or got no processor time, none can be started, or the pool is closed.
        """
        line = json.dumps(order).encode()
        for _ in range(TRIES):
            worker = self._take()
            try:
                answer = worker.ask(line, seconds, self._wall_seconds)
            except Lost:
                self._drop(worker)
                continue
            except Exceeded:
                self._drop(worker)
                self.start()  # so that the next order finds a worker that has started
                raise
            except BaseException:  # Ctrl-C: the next order would get the answer to this one
                self._drop(worker)
                raise
            self._give_back(worker)
            return json.loads(answer)
        raise Unavailable(f"The process that {self._what} was lost twice. Try again in a moment.")

    def close(self) -> None:
        """End all workers, and start no more."""
        with self._lock:
            self._closed = True
            for worker in self._workers - set(self._idle):
                worker.kill()  # the thread that waits for its answer closes it
            while self._idle:
                self._let_go(self._idle.pop())

    def _take(self) -> WorkerProcess:
        with self._lock:
            if self._closed:
                raise Unavailable("The engine is being closed.")
            if self._owner != os.getpid():  # after a fork: they are the parent's, and we would read its answers
                self._owner = os.getpid()
                self._idle.clear()
                self._workers.clear()
            while self._idle:
                worker = self._idle.pop()
                if not worker.ended:
                    return worker
                self._let_go(worker)
            return self._new()

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if self._closed:
                self._let_go(worker)
            else:
                self._idle.append(worker)

    def _drop(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._let_go(worker)

    def _new(self) -> WorkerProcess:
        try:
            worker = WorkerProcess(self._program, self._hello)
        except OSError as error:
            message = f"The process that {self._what} cannot be started: {error.strerror}. Try again in a moment."
            raise Unavailable(message) from error
        self._workers.add(worker)
        return worker

    def _let_go(self, worker: WorkerProcess) -> None:
        self._workers.discard(worker)
        worker.close()


def _close_all(workers: set[WorkerProcess], owner: int) -> None:
    while workers and owner == os.getpid():
        workers.pop().close()
