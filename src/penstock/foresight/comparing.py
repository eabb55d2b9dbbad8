"""Compares a recorded day with the same day under other options: which requests and tenants gain or lose.

The day is simulated twice, with its own options and with others, and the two simulations are compared. So errors of the
model of step times are in both, and both are slow at the moments when the machine was slow. Each runs with several
seeds, and a request's latency is its mean over the seeds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.contract.scheduler_config import SchedulerConfig
from penstock.foresight.arrivals import Served
from penstock.foresight.engine import SimulatedEngine, simulated_config
from penstock.foresight.figures import LATENCIES, QUANTILES, figures
from penstock.foresight.recorded import RecordedRun

__all__ = ["Comparison", "Day", "compare", "comparison_record", "comparison_table", "simulate_day"]

_MATTERS = 0.05
"""A request gained or lost if its time changed by more than this share."""

_SHOWN = 12
"""The most tenants in a table; the record has all of them."""


@dataclass(frozen=True, slots=True)
class Day:
    """A workload, simulated with several seeds.

    Attributes:
        served: what became of its requests, with all seeds.
        means: (seconds to the first token, seconds to the end) by request, means over the seeds; only of requests that
            ended with every seed.
        tenants: the tenant of each request.
        refused, left: requests that the scheduler refused, callers that left before a first token; mean over seeds.
        steps, preemptions: mean over seeds.
        seconds: until the last request ended; mean over seeds.
    """

    served: list[Served]
    means: dict[str, tuple[float, float]]
    tenants: dict[str, str]
    refused: float
    left: float
    steps: float
    preemptions: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A recorded day, a simulation of it, and a simulation of it with other options."""

    run: RecordedRun
    config: SchedulerConfig
    same: Day
    other: Day


def simulate_day(
    run: RecordedRun,
    config: SchedulerConfig,
    seeds: Iterable[int],
    progress: Callable[[int], object] = lambda count: None,  # noqa: ARG005
) -> Day:
    """Simulate a recorded workload.

    Args:
        run: the recorded arrivals, and what the steps took.
        config: the scheduler's options.
        seeds: one for each simulation.
        progress: called as requests arrive, with how many arrived since the last call.
    """
    engines = []
    for seed in seeds:
        engine = SimulatedEngine(simulated_config(config), run.costs, seed, part=0.0)
        for arrival in run.arrivals:
            engine.run(arrival.at)
            engine.offer(arrival)
            progress(1)
        engine.run()
        engines.append(engine)
    by_request: dict[str, list[Served]] = defaultdict(list)
    for engine in engines:
        for served in engine.served:
            by_request[served.id].append(served)
    whole = {each: of for each, of in by_request.items() if len(of) == len(engines)}
    return Day(
        served=[served for engine in engines for served in engine.served],
        means={
            each: (_mean([s.first_token for s in of]), _mean([s.end_to_end for s in of])) for each, of in whole.items()
        },
        tenants={each: of[0].tenant for each, of in whole.items()},
        refused=_mean([len(engine.refused) for engine in engines]),
        left=_mean([len(engine.left) for engine in engines]),
        steps=_mean([engine.steps for engine in engines]),
        preemptions=_mean([engine.scheduler.stats.preemptions for engine in engines]),
        seconds=_mean([engine.now for engine in engines]),
    )


def compare(
    run: RecordedRun,
    config: SchedulerConfig,
    seeds: int = 3,
    progress: Callable[[int], object] = lambda count: None,  # noqa: ARG005
) -> Comparison:
    """Simulate a recorded day with its own options and with `config`."""
    same = simulate_day(run, run.config, range(seeds), progress)
    other = simulate_day(run, config, range(seeds), progress)
    return Comparison(run, config, same, other)


def comparison_record(compared: Comparison) -> dict[str, Any]:
    """A comparison as JSON; times in milliseconds."""
    return {
        "kind": "replay",
        "recorded_config": _plain(compared.run.config),
        "config": _plain(compared.config),
        "requests": len(compared.run.arrivals),
        "recorded": _milliseconds(compared.run.served),
        "simulated_as_recorded": _milliseconds(compared.same.served),
        "simulated": _milliseconds(compared.other.served),
        "changes": {"": _changes(compared, None)}
        | {f"tenant {tenant}": _changes(compared, tenant) for tenant in _tenants(compared)},
        "refused": [compared.same.refused, compared.other.refused],
        "left": [compared.same.left, compared.other.left],
        "steps": [compared.same.steps, compared.other.steps],
        "preemptions": [compared.same.preemptions, compared.other.preemptions],
        "seconds": [compared.same.seconds, compared.other.seconds],
    }


def comparison_table(record: dict[str, Any]) -> str:
    """A comparison's record as a table for people."""
    before, after = record["recorded_config"], record["config"]
    changed = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    lines = [
        f"changed: {', '.join(changed) or 'nothing'}",
        "",
        f"{'milliseconds':<20}{'recorded':>12}{'simulated':>12}{'with these':>12}",
    ]
    for latency, name in LATENCIES.items():
        columns = [record[each].get(latency, {}) for each in ("recorded", "simulated_as_recorded", "simulated")]
        for quantile in (f"p{each}" for each in QUANTILES):
            shown = "".join(_cell(column.get(quantile)) for column in columns)
            lines.append(f"{name + ' ' + quantile:<20}{shown}")
    for name in ("steps", "preemptions", "refused", "left", "seconds"):
        one, other = record[name]
        lines.append(f"{name:<20}{'':>12}{one:>12.1f}{other:>12.1f}")
    lines += [
        "",
        f"{'who gained and lost':<20}{'requests':>12}{'sooner':>12}{'later':>12}{'first token, ms':>26}{'end, ms':>26}",
    ]
    changes = record["changes"]
    for name in list(changes)[: _SHOWN + 1]:
        one = changes[name]
        row = f"{name or 'all':<20}{one['requests']:>12}{one['sooner']:>12}{one['later']:>12}"
        lines.append(row + _change(one["first_token_ms"]) + _change(one["end_to_end_ms"]))
    if len(changes) > _SHOWN + 1:
        lines.append(f"and {len(changes) - _SHOWN - 1} more tenants: --json has them")
    return "\n".join(lines)


def _changes(compared: Comparison, tenant: str | None) -> dict[str, Any]:
    """How the requests of a tenant, or all requests, changed from one simulation to the other."""
    before, after = compared.same.means, compared.other.means
    shared = [each for each in before if each in after and tenant in (None, compared.same.tenants[each])]
    first = [(after[each][0] - before[each][0]) * 1e3 for each in shared]
    end = [(after[each][1] - before[each][1]) * 1e3 for each in shared]
    relative = [after[each][1] / before[each][1] - 1 for each in shared]
    return {
        "requests": len(shared),
        "sooner": sum(each < -_MATTERS for each in relative),
        "later": sum(each > _MATTERS for each in relative),
        "first_token_ms": _spread(first),
        "end_to_end_ms": _spread(end),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    places = {"p1": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
    spread = {name: ordered[round((len(ordered) - 1) * place)] for name, place in places.items()}
    return spread | {"mean": statistics.fmean(values)}


def _tenants(compared: Comparison) -> list[str]:
    """Tenants, by falling number of requests; an empty list if there is only one tenant."""
    counts: dict[str, int] = defaultdict(int)
    for tenant in compared.same.tenants.values():
        counts[tenant] += 1
    return [] if len(counts) < 2 else sorted(counts, key=lambda each: (-counts[each], each))


def _milliseconds(served: Sequence[Served]) -> dict[str, Any]:
    return {
        latency: {name: [value * 1e3 for value in estimate] for name, estimate in of_one.items()}
        for latency, of_one in figures(served).items()
    }


def _cell(estimate: list[float] | None) -> str:
    return f"{'-':>12}" if estimate is None else f"{estimate[0]:>12.1f}"


def _change(spread: dict[str, float]) -> str:
    """The mean change, with the 10th and the 90th percentile, in words."""
    if not spread:
        return f"{'-':>26}"
    shown = f"{spread['mean']:+.0f} ({spread['p10']:+.0f} to {spread['p90']:+.0f})"
    return f"{shown:>26}"


def _plain(config: SchedulerConfig) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(config).items()}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
