"""Threads for work that a step may wait for, but not for long.

One of them, the first, does everything that is quick. What takes long keeps its thread, which from then on goes last
where processors are few, and another becomes the first: so work is delayed by what is quick alone, and as few threads
compete with a step as there can be.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from penstock.thread_turns import give_way, go_last, letting_others, taking_turns

__all__ = ["SideThreads"]

_LONG_SECONDS = 0.01
"""Of work that keeps its thread."""
_IDLE_SECONDS = 0.2
"""After which a thread ends that has nothing to do: Python, which waits for its threads, is not kept from ending."""

_Result = TypeVar("_Result")


class _Job:
    """Work, and the future of what comes of it."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        give_way()
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # whoever asks for the result gets it
            self.future.set_exception(error)


class _Worker:
    """One thread; what it does is guarded by the lock of its owner."""

    __slots__ = ("began", "job", "native_id")

    def __init__(self) -> None:
        self.native_id = 0
        self.job: _Job | None = None
        self.began = 0.0


class SideThreads:
    """Does work in the order in which it comes. Used by one thread, its owner.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[_Job] = deque()
        self._gathered: list[_Job] | None = None
        self._change = threading.Condition()  # guards what follows, and the jobs
        self._first: _Worker | None = None
        self._long: set[Future[Any]] = set()  # what keeps its thread

    def submit(self, work: Callable[[], _Result], *, long: bool = False) -> Future[_Result]:
        """Have `work` done soon; if it is likely to be `long`, in a thread of its own that goes last."""
        job = _Job(work)
        if long:
            self._keep(job.future)
            threading.Thread(target=_run_last, args=(job,), name=self._name).start()
        elif self._gathered is not None:
            self._gathered.append(job)
        else:
            self._hand_over([job])
        return job.future

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hand what is submitted meanwhile over at the end: a thread wakes up once, and not while more is submitted."""
        self._gathered = gathered = []
        try:
            yield
        finally:
            self._gathered = None
            if gathered:
                self._hand_over(gathered)

    def _hand_over(self, jobs: list[_Job]) -> None:
        with self._change:
            self._jobs.extend(jobs)
            if self._first is None:
                self._begin()
            else:
                self._change.notify()

    def wait_until(self, futures: Sequence[Future[Any]], deadline: float) -> None:
        """Wait for what is quick among `futures`: not for what takes long, nor beyond `deadline` (`time.monotonic`)."""
        for future in reversed(futures):  # after the last of them the others are done, most often: one wait for all
            while not (future.done() or self._keeps_its_thread(future)):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                with letting_others(), suppress(TimeoutError):
                    future.exception(min(left, _LONG_SECONDS))

    def wait_for_any(self, futures: Iterable[Future[Any]], seconds: float) -> None:
        """Wait for one of `futures`, long or not."""
        with letting_others():
            wait(futures, seconds, FIRST_COMPLETED)

    def _keeps_its_thread(self, future: Future[Any]) -> bool:
        """Whether the work is long; lets another thread be the first if the one that is has long work."""
        with self._change:
            first, now = self._first, time.monotonic()
            if first is not None and first.job is not None and now - first.began >= _LONG_SECONDS:
                self._keep(first.job.future)
                go_last(first.native_id)
                self._begin()
            return future in self._long

    def _keep(self, future: Future[Any]) -> None:
        self._long.add(future)
        future.add_done_callback(self._long.discard)

    def _begin(self) -> None:
        """Start a thread that is the first one from now on; for whoever holds the lock."""
        self._first = worker = _Worker()
        threading.Thread(target=self._work, args=(worker,), name=self._name).start()

    def _work(self, me: _Worker) -> None:
        me.native_id = threading.get_native_id()
        while job := self._next_job(me):
            job.run()
            job = None  # a thread that waits holds on to nothing

    def _next_job(self, me: _Worker) -> _Job | None:
        """What comes next; None where another thread is the first, or nothing comes."""
        with self._change:
            me.job = None
            if self._first is me and not self._jobs and not self._change.wait_for(self._has_work, _IDLE_SECONDS):
                self._first = None
            if self._first is not me:
                return None
            me.job, me.began = self._jobs.popleft(), time.monotonic()
            return me.job

    def _has_work(self) -> bool:
        return bool(self._jobs)


def _run_last(job: _Job) -> None:
    go_last()
    with taking_turns():
        job.run()
