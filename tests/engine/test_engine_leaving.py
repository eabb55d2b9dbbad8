"""Readers leave at each point of each fault, in random company: nothing hangs or leaks, those that stay are answered.

`PENSTOCK_LEAVING` says how many times (by default once for each fault and point; 2,000 in deep runs).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import engine_harness as harness
from engine_harness import finishes_of, terminal_of, tokens_of

from penstock.contract.errors import RunnerLost
from penstock.contract.events import FinishReason, Output, RequestFailed
from penstock.contract.plan import StepPlan, StepResult
from penstock.engine import EngineLoop, LocalClient
from penstock.engine.admission import QueueLimits
from penstock.sim.fake_runner import FakeRunner

PATIENCE = 30.0  # seconds
FAULTS = ("raises at the start", "raises", "lost", "lost twice", "killed", "killed twice", "a row fails")
POINTS = (
    "before anything is computed",
    "as the step begins",
    "while it is computed",
    "in the reset",
    "as the next step begins",
    "while the next step is computed",
    "three steps later",
    "in the queue",
    "together with an abort",
    "all of them",
)
WHEN_IT_BEGINS = ("as the step begins", "in the queue", "together with an abort", "all of them")
NEVER = {
    ("a row fails", "while it is computed"),
    ("a row fails", "in the reset"),
    ("raises at the start", "while it is computed"),
}
PAIRS = [(fault, point) for fault in FAULTS for point in POINTS if (fault, point) not in NEVER]
TIMES = int(os.environ.get("PENSTOCK_LEAVING", len(PAIRS)))


class Faulty:
    """A fake runner with one fault; reports which point of it the engine's thread has reached, and waits for an answer.

    Attributes:
        happened: how often a step failed, or a row.
    """

    def __init__(self, runner: FakeRunner, fault: str, at: int, reached: Callable[[str], None]) -> None:
        self._runner = runner
        self._fault = fault
        self._at = at  # the step that goes wrong
        self._reached = reached
        self._left = 2 if "twice" in fault else 1
        self._since: int | None = None  # steps that began after the last failure
        self._recovered = True  # whether a step was computed since then
        self.happened = 0

    @property
    def depth(self) -> int:
        return self._runner.depth

    def start(self, plan: StepPlan) -> None:
        if plan.step == 0:
            self._reached("before anything is computed")
        if self._since is not None:
            self._since += 1
            if self._since in (1, 3):
                self._reached("as the next step begins" if self._since == 1 else "three steps later")
        if self._due(plan):
            self._reached("as the step begins")
        if self._fault == "raises at the start" and self._due(plan):
            self._happens()
            self._runner.crash_at(plan.step)
        self._runner.start(plan)
        if self._fault == "a row fails" and self._due(plan) and plan.rows:
            self._runner.fail_sequence(self._runner.occupied[plan.rows[-1].slot], "planted")
            self._happens()
        self._latest = plan

    def finish(self) -> StepResult:
        if not self._recovered:
            self._recovered = True
            self._reached("while the next step is computed")
        if self._due(self._latest) and self._fault not in ("a row fails", "raises at the start"):
            self._reached("while it is computed")
            self._happens()
            if self._fault == "raises":
                raise ZeroDivisionError("planted")
            self._runner.lose()
            raise RunnerLost("planted", killed="killed" in self._fault)
        return self._runner.finish()

    def reset(self) -> bool:
        self._reached("in the reset")
        return self._runner.reset()

    def _due(self, plan: StepPlan) -> bool:
        return self._left > 0 and plan.step >= self._at

    def _happens(self) -> None:
        self.happened += 1
        self._left -= 1
        self._since = 0
        self._recovered = False


class Life:
    """Eight requests, one fault, and the readers that leave at one point of it."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(number)
        self.fault, self.point = PAIRS[number % len(PAIRS)]
        self._event_loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[list[Output]]] = {}
        self._begun: set[str] = set()  # whose first output has come
        self.left: list[str] = []
        self.aborted: list[str] = []
        self._aborts: list[asyncio.Future[None]] = []

    async def lead(self) -> None:
        bench = harness.build(
            num_blocks=24, max_num_seqs=4, depth=self._rng.choice([1, 2]), around=self._around
        )  # half of them wait, and some are preempted
        engine_loop = EngineLoop(bench.engine, bench.clock, QueueLimits(1000))
        self._client = LocalClient(bench.intake, engine_loop)
        asked = {}
        for number in range(8):
            prompt = "abcdefghijkl"[self._rng.randrange(8) :]
            fields = {"n": self._rng.choice([1, 1, 2]), "max_tokens": self._rng.randrange(8, 20)}
            asked[f"r{number}"] = (prompt, fields)
            one = harness.request_of(f"r{number}", bench.text, prompt, **fields)
            self._tasks[one.id] = asyncio.create_task(self._read(one))
        engine_loop.start()
        try:
            await asyncio.wait(self._tasks.values())
            failed = self._check_answers(bench, asked)
            await self._check_rest(bench)
        finally:
            await asyncio.to_thread(self._client.close)
        assert self._runner.happened == (2 if "twice" in self.fault else 1)
        assert failed <= (self.fault in ("lost twice", "a row fails")), "a second loss is blamed on who was alone in it"

    def _around(self, runner: FakeRunner) -> Faulty:
        self._runner = Faulty(runner, self.fault, self._rng.randrange(1, 6), self._reached)
        return self._runner

    async def _read(self, one) -> list[Output]:
        outputs = []
        async for output in self._client.generate(one):
            self._begun.add(one.id)
            outputs.append(output)
        return outputs

    def _reached(self, point: str) -> None:
        """Called by the engine's thread, which goes on once the readers that leave have left."""
        if point != ("as the step begins" if self.point in WHEN_IT_BEGINS else self.point) or self.left:
            return
        done = threading.Event()
        self._event_loop.call_soon_threadsafe(self._leave, done)
        assert done.wait(PATIENCE), "the event loop stands still"

    def _leave(self, done: threading.Event) -> None:
        here = [name for name, task in self._tasks.items() if not task.done()]
        if self.point == "in the queue":
            here = [name for name in here if name not in self._begun] or here
        count = len(here) if self.point == "all of them" else self._rng.randrange(1, 1 + len(here) // 2)
        for name in self._rng.sample(here, count):
            self._tasks[name].cancel()
            self.left.append(name)
        if self.point == "together with an abort":
            self.aborted = [name for name in here if name not in self.left][:2]
            for name in (*self.aborted, *self.left):
                self._aborts.append(asyncio.ensure_future(self._client.abort(name)))
        self._event_loop.call_soon(self._event_loop.call_soon, done.set)  # cancelled tasks have run by then

    def _check_answers(self, bench: harness.Harness, asked: dict) -> int:
        """Check that every reader that stayed has the whole answer; returns how many requests failed instead."""
        failed = 0
        for name, (prompt, fields) in asked.items():
            if name in self.left:
                with suppress(asyncio.CancelledError):
                    self._tasks[name].result()  # it may have ended just before
                continue
            outputs = self._tasks[name].result()
            if isinstance(terminal_of(outputs), RequestFailed):
                failed += 1
                continue
            for choice in range(fields["n"]):
                tokens = bench.expected(prompt, fields["max_tokens"], choice=choice)
                said = tokens_of(outputs, choice)
                if name in self.aborted and finishes_of(outputs)[choice].reason is FinishReason.ABORT:
                    assert said == tokens[: len(said)]
                else:
                    assert said == tokens, name
        return failed

    async def _check_rest(self, bench: harness.Harness) -> None:
        """Check that nothing is left of any request, and that a new one is answered."""
        await self._client.heartbeat()  # messages before it have been handled
        assert not bench.engine._requests
        assert not bench.engine._owners
        outputs = [output async for output in self._client.generate(harness.request_of("new", bench.text, "abc"))]
        assert tokens_of(outputs) == bench.expected("abc", 8)
        await self._client.heartbeat()
        health = bench.engine.health()
        assert (health.alive, health.running, health.waiting) == (True, 0, 0)
        assert health.free_blocks == bench.config.num_blocks
        bench.engine.scheduler.check()


async def test_whoever_leaves_while_something_fails_takes_nobody_along(caplog):
    caplog.set_level(logging.CRITICAL, "penstock")  # each fault is logged
    left: Counter[tuple[str, str]] = Counter()
    for number in range(TIMES):
        life = Life(number)
        try:
            async with asyncio.timeout(PATIENCE):
                await life.lead()
        except BaseException as error:
            error.add_note(f"number {number}: {life.fault}; {life.left} left {life.point}")
            raise
        left[life.fault, life.point] += len(life.left)
    assert [pair for pair in PAIRS if not left[pair]] == [], "somebody leaves at each point of each fault"
