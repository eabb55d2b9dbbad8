"""A profile of a running engine: what its steps were, and what its thread computed in them, in files for Perfetto.

There are two files of Chrome trace events. `NAME-steps.json`, written here, has plan, run and commit of each step and
the rows of each slot. `NAME-torch.json`, written by the `Profiler`, has each of these parts as a span. The files hold
ids of sequences, counts and times, but no text and no token ids.
Decides that a profile ends by itself after `MAX_STEPS` steps: a forgotten profile would fill the memory.
The engine's thread calls everything but `write`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from penstock.contract.errors import EngineFault
from penstock.contract.plan import Row, StepPlan
from penstock.contract.ports import Clock, Profiler
from penstock.contract.stats import SchedulerStats
from penstock.core import Scheduler

__all__ = ["MAX_STEPS", "Profile", "Profiles"]

MAX_STEPS = 500
PROCESS = 1
ENGINE_TRACK = 0
"""Track of the engine's parts in the steps' file; below it, slot `n` has track `n + 1`."""

Event = dict[str, Any]

_Taken = ParamSpec("_Taken")
_Given = TypeVar("_Given")


class Profiles:
    """Makes the profiles of one engine, one after the other.

    Args:
        directory: where the files go; it exists.
        profiler: records what the engine's thread computes.
        prefix: how the files' names begin, if other engines of this process write to the same directory.
    """

    def __init__(self, directory: Path, profiler: Profiler, clock: Clock, prefix: str = "") -> None:
        self._directory = directory
        self._prefix = prefix
        self._profiler = profiler
        self._clock = clock
        self._numbers = count(1)

    def new(self) -> Profile:
        """A profile that has not begun, with a name of its own."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        name = f"{self._prefix}profile-{stamp}-{os.getpid()}-{next(self._numbers)}"
        return Profile(self._directory / name, self._profiler, self._clock)


class Profile:
    """One profile: begun, stopped, written.

    Args:
        stem: the files' path, without the ending of their names.
    """

    def __init__(self, stem: Path, profiler: Profiler, clock: Clock) -> None:
        self._stem = stem
        self._profiler = profiler
        self._clock = clock
        self._began = 0.0
        self._events = [_named("process_name", ENGINE_TRACK, "Penstock"), _named("thread_name", ENGINE_TRACK, "engine")]
        self._tracks = {ENGINE_TRACK}
        self._run: Event = {}
        self._steps = 0
        self._recording = False
        self._write_torch: Callable[[Path], None] | None = None

    def start(self) -> None:
        """Begin to record.

        Raises:
            EngineFault: the profiler cannot start.
        """
        self._profiler.start()
        self._recording, self._began = True, self._clock.now()

    def stop(self) -> None:
        """Stop recording; what was recorded can be written from any thread.

        Raises:
            EngineFault: the profiler cannot return what it recorded.
        """
        if self._recording:
            self._recording = False
            self._write_torch = self._profiler.stop()

    def around(self, name: str, part: Callable[_Taken, _Given]) -> Callable[_Taken, _Given]:
        """Wrap the part of a step that is called `name`, so that each call is recorded."""

        def recorded(*args: _Taken.args, **named: _Taken.kwargs) -> _Given:
            if not self._recording:
                return part(*args, **named)
            began = self._clock.now()
            with self._profiler.span(name):
                result = part(*args, **named)
            event = self._span(name, began, self._clock.now(), ENGINE_TRACK)
            if name == "run":
                self._run = event
            return result

        return recorded

    def stepped(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Record a step that is over: what was in its plan, and the scheduler's counts."""
        if not self._recording:
            return
        self._run["args"] = {"step": plan.step, "tokens": plan.num_tokens, "plan": plan.explain()}
        for row in plan.rows:
            self._note_row(row)
        self._note_counts(scheduler.stats)
        self._steps += 1
        if self._steps == MAX_STEPS:
            self.stop()

    def write(self) -> tuple[str, ...]:
        """Write the files of a profile that was stopped; returns their names, without the folder.

        Raises:
            EngineFault: the files cannot be written; says why, without the folder.
        """
        if self._write_torch is None:
            return ()
        steps, torch = (self._stem.with_name(f"{self._stem.name}-{kind}.json") for kind in ("steps", "torch"))
        try:
            with steps.open("x", encoding="utf-8") as file:
                json.dump({"displayTimeUnit": "ms", "traceEvents": self._events}, file)
            self._write_torch(torch)
        except OSError as error:
            raise EngineFault(
                f"The profile could not be written to --profile-dir: {error.strerror or error}."
            ) from error
        return steps.name, torch.name

    def _note_row(self, row: Row) -> None:
        track, run = row.slot + 1, self._run
        if track not in self._tracks:
            self._tracks.add(track)
            self._events.append(_named("thread_name", track, f"slot {row.slot}"))
        name = "decode" if row.sample and row.count == 1 + len(row.drafts) else f"prompt, {row.count} tokens"
        args = {"start": row.start, "count": row.count, "drafts": len(row.drafts)}
        self._events.append({**run, "name": name, "tid": track, "args": args})

    def _note_counts(self, stats: SchedulerStats) -> None:
        counted = {
            "sequences": {"running": stats.running, "waiting": stats.waiting},
            "KV blocks": {"held": stats.total_blocks - stats.free_blocks},
        }
        now = self._microseconds(self._clock.now())
        self._events += [
            {"name": name, "ph": "C", "pid": PROCESS, "ts": now, "args": of} for name, of in counted.items()
        ]

    def _span(self, name: str, began: float, ended: float, track: int) -> Event:
        since = self._microseconds(began)
        duration = self._microseconds(ended) - since
        event: Event = {"name": name, "ph": "X", "pid": PROCESS, "tid": track, "ts": since, "dur": duration, "args": {}}
        self._events.append(event)
        return event

    def _microseconds(self, instant: float) -> float:
        return round((instant - self._began) * 1e6, 3)


def _named(kind: str, track: int, name: str) -> Event:
    """The name of a process or of a track."""
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": track, "args": {"name": name}}
