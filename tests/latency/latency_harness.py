"""An engine around the fake runner on a simulated clock, and the parts of its requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_harness import Harness, build, terminal_of

from penstock.contract.measurements import PARTS, LatencyParts
from penstock.core import Scheduler
from penstock.engine import Engine, Recorder

ROUNDING = 1e-9
BETWEEN = 0.002
"""Seconds that the engine takes between two steps, so that this time shows."""


def timed(*, record: Path | None = None, **options) -> Harness:
    """A harness whose engine has the clock of its runner."""
    harness = build(**options)
    recorder = Recorder(record, harness.config, harness.clock) if record else None
    scheduler = Scheduler(harness.config)
    harness.engine = Engine(scheduler, harness.runner, harness.text, recorder, clock=harness.clock)
    return harness


def run(harness: Harness, most_steps: int = 2000) -> None:
    """Step until nothing is left, with a pause between steps."""
    for _ in range(most_steps):
        if not harness.engine.has_work:
            return
        harness.clock.advance(BETWEEN)
        harness.step()
    raise AssertionError("the engine did not finish")


def parts_of(harness: Harness, request_id: str) -> LatencyParts:
    """The parts of a finished request, which sum to its wall time."""
    timings = terminal_of(harness.outputs[request_id]).timings
    parts = timings.parts
    assert parts.total == pytest.approx(timings.ended - timings.arrived, abs=ROUNDING)
    assert sum(seconds for _, seconds in parts.queue_for) == pytest.approx(parts.queue, abs=ROUNDING)
    assert all(getattr(parts, name) >= -ROUNDING for name in PARTS)
    return parts
