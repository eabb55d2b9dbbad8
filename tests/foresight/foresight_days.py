"""Records for tests: days that ran on a simulated clock, with the fake model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.contract.plan import StepResult
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler, trace
from penstock.core.trace import stamped
from penstock.sim import FakeRunner, StepCost

__all__ = ["COST", "record_day"]

COST = StepCost(step=0.010, token=0.001, context=0.00001)
AROUND, AFTER = 0.0005, 0.001
"""Seconds between a plan and its runner, and between a result and the next plan."""


def record_day(
    config: SchedulerConfig,
    requests: Sequence[SequenceRequest],
    cost: StepCost = COST,
    aborts: dict[str, float] | None = None,
    pace: Callable[[float], float] = lambda at: 1.0,
) -> list[str]:
    """The lines of an engine's record: `requests` come at their `arrival`, and are aborted as `aborts` says.

    Args:
        config: the scheduler's.
        requests: in order of arrival.
        cost: what steps cost.
        aborts: when requests are aborted, by id.
        pace: by what factor a step takes longer, by the time when it begins.
    """
    scheduler, runner = Scheduler(config), FakeRunner(config)
    lines, now, coming = [stamped(trace.encode_header(config), 0.0)], 0.0, list(requests)
    aborts = dict(aborts or {})
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            scheduler.submit(coming[0])
            lines.append(stamped(trace.encode_submit(coming.pop(0)), now))
        for seq_id in [each for each, at in aborts.items() if at <= now]:
            del aborts[seq_id]
            scheduler.abort(seq_id)
            lines.append(stamped(trace.encode_abort(seq_id), now))
        if not scheduler.has_work:
            continue
        plan = scheduler.plan()
        lines.append(stamped(trace.encode_plan(plan), now))
        seconds = cost.seconds(plan) * pace(now)
        result: StepResult = replace(runner.run(plan), seconds=seconds)
        now += seconds + AROUND
        lines.append(stamped(trace.encode_result(result), now))
        scheduler.commit(plan, result)
        now += AFTER
    return [line + "\n" for line in lines]
