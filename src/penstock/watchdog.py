"""Watches steps: reports a step that takes far longer than earlier ones, once, with the stacks of all threads.

Decides when a step is overdue (`HangLimit`, as for a runner in a separate process) and when only a new process would
help. Ends nothing itself: a thread that computes cannot be ended, and the runner of a hung process ends it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from traceback import walk_stack
from typing import NamedTuple

from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.ports import OverlappingRunner, Runner
from penstock.engine.stand_ins import OneAtATime
from penstock.remote.hang_limit import HangLimit

__all__ = ["WatchedRunner", "Watchdog"]

TURN_SECONDS = 1.0
"""Seconds between two looks. Time is counted in looks, so a step is not overdue if the whole process was stopped."""

LOST_TIMES = 4.0
LOST_SECONDS = 60.0
"""A step that takes this many times its limit, and at least this many seconds, is not expected to end."""

LAST_PLANS = 4
MOST_FRAMES = 40
MOST_ROWS = 16

log = logging.getLogger(__name__)


class _Work(NamedTuple):
    """The current work: a step, or (without a plan) a reset of the runner."""

    what: str
    plan: StepPlan | None
    limit: float
    turn: int
    began: float


class Watchdog:
    """Watches one runner; see `StepWatch`.

    Args:
        turn_seconds: seconds between two looks.
    """

    def __init__(self, turn_seconds: float = TURN_SECONDS) -> None:
        self._recovers = False
        self._turn_seconds = turn_seconds
        self._turn = 0
        self._work: _Work | None = None  # a new value for each step, so that any thread may read it
        self._reported: _Work | None = None
        self._last_plans: deque[StepPlan] = deque(maxlen=LAST_PLANS)
        self._hang_limit = HangLimit()

    def watch(self, runner: Runner | OverlappingRunner, *, recovers: bool) -> OverlappingRunner:
        """Wrap a runner, which must not have computed anything, so that its steps are watched.

        Args:
            runner: the runner.
            recovers: whether the runner itself ends a hung process, and starts another.
        """
        self._recovers = recovers
        return WatchedRunner(runner if isinstance(runner, OverlappingRunner) else OneAtATime(runner), self)

    def overdue(self) -> str:
        """See `StepWatch`."""
        work = self._work
        if work is None or self._seconds(work) < work.limit:
            return ""
        return f"{work.what} has taken {self._seconds(work):.0f} s" if work.plan is not None else work.what

    def lost(self) -> str:
        """See `StepWatch`."""
        work = self._work
        if self._recovers or work is None or self._seconds(work) < max(LOST_SECONDS, LOST_TIMES * work.limit):
            return ""
        return f"{self.overdue()} and is not expected to end"

    def began(self) -> float:
        """See `StepWatch`."""
        work = self._work
        return float("inf") if work is None else work.began

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While in this context, look from a thread; outside, no time passes for this watchdog."""
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(ended,), name="penstock-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def begin_step(self, plan: StepPlan) -> None:
        """Note that the runner computes this plan from now on."""
        limit = self._hang_limit.of(plan)
        self._work = _Work(f"step {plan.step}", plan, limit, self._turn, time.monotonic())

    def begin_reset(self) -> None:
        """Note that the runner is being reset, and computes nothing until that is done."""
        self._work = _Work("what computes is being started anew", None, 0.0, self._turn, time.monotonic())

    def end(self) -> None:
        """Note that the step or reset has ended."""
        work, self._work = self._work, None
        if work is None or work.plan is None:
            return
        self._last_plans.append(work.plan)
        # Bounded by looks too: a step during which the process was stopped says nothing about later ones.
        seconds = min(time.monotonic() - work.began, (self._turn - work.turn + 1) * self._turn_seconds)
        self._hang_limit.ran(work.plan, seconds)
        if work is self._reported:
            log.warning("%s ended, after %.1f s", work.what, seconds)

    def _seconds(self, work: _Work) -> float:
        """The least seconds that the work has taken so far."""
        return max(0, self._turn - work.turn - 1) * self._turn_seconds

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(self._turn_seconds):
            self._turn += 1
            work, overdue = self._work, self.overdue()
            if overdue and work is not None and work.plan is not None and work is not self._reported:
                self._reported = work
                self._report(work.plan, overdue, work.limit)

    def _report(self, plan: StepPlan, overdue: str, limit: float) -> None:
        log.error("%s, where %.1f s would be long: %s", overdue, limit, _described(plan))
        for earlier in reversed(self._last_plans.copy()):
            log.error("before it: %s", _described(earlier))
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            frames = (f"{each.f_code.co_name} ({each.f_code.co_filename}:{line})" for each, line in walk_stack(frame))
            log.error("thread %s is in %s", names.get(ident, ident), " < ".join(islice(frames, MOST_FRAMES)))


class WatchedRunner:
    """A runner that tells a watchdog about its steps; see `OverlappingRunner`."""

    def __init__(self, runner: OverlappingRunner, watchdog: Watchdog) -> None:
        self._runner = runner
        self._watchdog = watchdog
        self._started: deque[StepPlan] = deque()

    @property
    def depth(self) -> int:
        """See `OverlappingRunner`."""
        return self._runner.depth

    def start(self, plan: StepPlan) -> None:
        """See `OverlappingRunner`."""
        self._started.append(plan)
        if len(self._started) == 1:
            self._watchdog.begin_step(plan)
        self._runner.start(plan)

    def finish(self) -> StepResult:
        """See `OverlappingRunner`."""
        result = self._runner.finish()
        self._started.popleft()
        self._watchdog.end()
        if self._started:
            self._watchdog.begin_step(self._started[0])
        return result

    def reset(self) -> bool:
        """See `OverlappingRunner`."""
        self._started.clear()
        self._watchdog.begin_reset()
        try:
            return self._runner.reset()
        finally:
            self._watchdog.end()


def _described(plan: StepPlan) -> str:
    rows = ", ".join(f"slot {row.slot} from {row.start} on: {row.count}" for row in plan.rows[:MOST_ROWS])
    return f"{plan.explain()}; positions: {rows}{', ...' if len(plan.rows) > MOST_ROWS else ''}"
