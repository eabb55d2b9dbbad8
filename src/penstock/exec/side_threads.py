"""Threads for work that a step may wait for, but not for long.

One of these threads, called the first, does all quick work. Long work keeps its thread, and another thread becomes the
first, so work waits only for quick work. All have low priority: while a step waits for them its processors are idle,
and while a step computes they take only the time that it leaves.
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
"""Seconds after which work counts as long and keeps its thread."""
_IDLE_SECONDS = 0.2
"""Idle seconds after which a thread ends, so that it does not keep Python from exiting."""

_Result = TypeVar("_Result")


class _Job:
    """Work and the future of its result."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        give_way()
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # raised for the caller that asks for the result
            self.future.set_exception(error)


class _Worker:
    """One thread; its state is guarded by the owner's lock."""

    __slots__ = ("began", "job")

    def __init__(self) -> None:
        self.job: _Job | None = None
        self.began = 0.0


class SideThreads:
    """Does work in order of submission. Used by one thread, its owner.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[_Job] = deque()
        self._gathered: list[_Job] | None = None
        self._change = threading.Condition()  # guards what follows, and the jobs
        self._first: _Worker | None = None
        self._long: set[Future[Any]] = set()  # futures of work that keeps its thread

    def submit(self, work: Callable[[], _Result], *, long: bool = False) -> Future[_Result]:
        """Submit `work`; if it is likely to be `long`, it gets a thread of its own."""
        job = _Job(work)
        if long:
            self._keep(job.future)
            threading.Thread(target=_run_long, args=(job,), name=self._name).start()
        elif self._gathered is not None:
            self._gathered.append(job)
        else:
            self._hand_over([job])
        return job.future

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hand over all work submitted within this block at its end, so that a thread wakes up only once."""
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
        """Wait for the quick ones among `futures`: not for long work, nor beyond `deadline` (`time.monotonic`)."""
        for future in reversed(futures):  # when the last is done, most often so are the others: one wait for all
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
        """Whether the work is long. If the first thread's work has become long, another thread becomes the first."""
        with self._change:
            first, now = self._first, time.monotonic()
            if first is not None and first.job is not None and now - first.began >= _LONG_SECONDS:
                self._keep(first.job.future)
                self._begin()
            return future in self._long

    def _keep(self, future: Future[Any]) -> None:
        self._long.add(future)
        future.add_done_callback(self._long.discard)

    def _begin(self) -> None:
        """Start a thread, which becomes the first; the caller holds the lock."""
        self._first = worker = _Worker()
        threading.Thread(target=self._work, args=(worker,), name=self._name).start()

    def _work(self, me: _Worker) -> None:
        go_last()
        while job := self._next_job(me):
            job.run()
            job = None  # a waiting thread keeps nothing alive

    def _next_job(self, me: _Worker) -> _Job | None:
        """The next job; None if another thread is the first, or if no job comes in time."""
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


def _run_long(job: _Job) -> None:
    go_last()
    with taking_turns():
        job.run()
