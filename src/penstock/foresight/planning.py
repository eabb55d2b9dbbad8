"""Finds how much of a workload a machine holds: the highest rate that meets goals, by bisection over simulated days.

A day holds if, for each goal, no more of its samples are above the bound than the quantile allows. The highest rate is
sought for each of several seeds, which draw other requests (or, for a file, other step durations). The report gives the
median of the seeds, and the lowest and the highest as interval. The lowest is the rate to plan for: at the median,
every other day misses a goal. Options are compared on the same seeds, and so on the same requests.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.foresight.arrivals import Arrival, Served
from penstock.foresight.calibration import Way
from penstock.foresight.engine import SimulatedEngine, simulated_config
from penstock.foresight.figures import LATENCIES, Estimate, estimates, samples_of
from penstock.foresight.fleet import Chooser, Fleet, InTurn, Routed
from penstock.foresight.step_costs import StepCosts
from penstock.foresight.workloads import DRAWN, Drawn, Workload

__all__ = [
    "Goals",
    "Limit",
    "Machine",
    "Question",
    "at_rate",
    "drawn",
    "find_limit",
    "find_limits",
    "parse_slo",
    "spread",
    "variants",
]

_GOALS = ("ttft", "itl", "e2e")
_UNITS = {"ms": 1e-3, "s": 1.0}
_CLOSE = 1.03
"""The bisection ends when the rate that holds and the one that does not are this close."""

_MOST_RATE, _LEAST_RATE = 1e4, 1e-4

Goals = Mapping[str, float]
"""Bounds in seconds, by latency."""


def parse_slo(text: str) -> dict[str, float]:
    """Parse goals such as `ttft=1s,itl=100ms`.

    Raises:
        ConfigError: the text does not have that form, names a goal twice, or names none.
    """
    goals: dict[str, float] = {}
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(ms|s)\s*", word)
        if found is None or found[1] not in _GOALS or not float(found[2]):
            raise ConfigError("slo", f"{word!r} is not like ttft=1s or itl=100ms; goals are {', '.join(_GOALS)}")
        if found[1] in goals:
            raise ConfigError("slo", f"{found[1]} is given twice")
        goals[found[1]] = float(found[2]) * _UNITS[found[3]]
    return goals


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that serves, or several machines of the same kind.

    Attributes:
        config: the configuration of each scheduler.
        costs: how long steps take.
        way: the time that passes between clients and engines.
        replicas: number of engines, each on a machine like this one.
        routed: whether requests are routed by the prefixes that replicas hold (`Routed`); else in turn.
    """

    config: SchedulerConfig
    costs: StepCosts
    way: Way
    replicas: int = 1
    routed: bool = False

    def engines(self, seed: int) -> list[SimulatedEngine]:
        """Its engines, without any work."""
        config = simulated_config(self.config)
        return [SimulatedEngine(config, self.costs, seed * 1000 + each) for each in range(self.replicas)]

    def chooser(self, seed: int) -> Chooser:
        """The chooser that decides which engine gets a request."""
        return Routed(self.replicas, seed) if self.routed else InTurn()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a machine.

    Attributes:
        workload: the workload of a file, or what to draw.
        goals: bounds in seconds, as clients see them.
        quantile: percent of the samples that must be within each bound.
        requests: number of requests in each simulated day; the most to read if the workload is a file.
    """

    workload: Workload | Drawn
    goals: Goals
    quantile: float
    requests: int

    def arrivals(self, machine: Machine, rate: float, seed: int) -> list[Arrival]:
        """The requests of a day at `rate` requests a second."""
        longest = machine.config.max_model_len
        if isinstance(self.workload, Drawn):
            return list(self.workload.draw("", rate, self.requests, seed).arrivals(longest))
        return list(self.workload.arrivals(longest, rate / self.workload.rate))


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a machine holds, for each seed.

    Attributes:
        rates: requests a second.
        streams: requests under way at once at that rate, the mean over the day.
    """

    rates: tuple[float, ...]
    streams: tuple[float, ...]

    @property
    def advised(self) -> float:
        """The rate to plan for, in requests a second: the lowest, which every simulated day holds."""
        return min(self.rates)

    @property
    def rate(self) -> Estimate:
        """Requests a second: the median, the lowest and the highest of the seeds."""
        return spread(self.rates)

    @property
    def stream(self) -> Estimate:
        """Streams: the median, the lowest and the highest of the seeds."""
        return spread(self.streams)


def find_limit(question: Question, machine: Machine, seeds: Sequence[int], near: float = 0.0) -> Limit:
    """Find the highest rate that holds, for each seed.

    Args:
        question: what is asked.
        machine: the machine that it is asked of.
        seeds: one for each simulated day.
        near: a rate to begin with; 0.0 if nothing is known.
    """
    rates: list[float] = []
    streams: list[float] = []
    for seed in seeds:
        rate, stream = _limit(question, machine, seed, rates[-1] if rates else near)
        rates.append(rate)
        streams.append(stream)
    return Limit(tuple(rates), tuple(streams))


def find_limits(
    question: Question, machines: Mapping[str, Machine], seeds: Sequence[int], near: float, jobs: int
) -> Iterator[tuple[str, Limit]]:
    """Find the limits of several machines; yields (name, limit) as they are found.

    Args:
        question: what is asked.
        machines: the machines that it is asked of, by name.
        seeds: one for each simulated day.
        near: a rate to begin with.
        jobs: processes that simulate at once; 1 to simulate in this process.
    """
    if jobs == 1:
        for name, machine in machines.items():
            yield name, find_limit(question, machine, seeds, near)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:  # no fork: threads may run here
        names = {pool.submit(find_limit, question, machine, seeds, near): name for name, machine in machines.items()}
        for done in as_completed(names):
            yield names[done], done.result()


def _limit(question: Question, machine: Machine, seed: int, near: float) -> tuple[float, float]:
    """The highest rate that holds, and the streams at it; 0.0 and 0.0 if none does."""
    rate, low, high, streams = near or 1.0, 0.0, 0.0, 0.0
    step = 1.3 if near else 2.0
    while _LEAST_RATE < rate < _MOST_RATE and not (low and high and high <= low * _CLOSE):
        held = _held(question, machine, seed, rate)
        if held is None:
            high = rate
        else:
            low, streams = rate, held
        if low and high:
            rate = math.sqrt(low * high)
        else:
            rate = low * step if low else high / step
            step *= step
    return low, streams


def _held(question: Question, machine: Machine, seed: int, rate: float) -> float | None:
    """The mean number of streams of a day at this rate; None if a goal was missed."""
    arrivals = question.arrivals(machine, rate, seed)
    fleet, chooser = Fleet(machine.engines(seed)), machine.chooser(seed)
    misses = [_Misses(question, machine.way, arrivals, engine) for engine in fleet.engines]
    for arrival in arrivals:
        fleet.run(arrival.at)
        if _Misses.too_many(misses):
            return None  # the rest of the day cannot change that
        fleet.offer(chooser.choose(arrival, fleet.engines), arrival)
    served = _finish(fleet)
    met = all(_met(question, machine.way, served, latency, bound) for latency, bound in question.goals.items())
    return _streams(served) if met and len(served) == len(arrivals) else None


class _Misses:
    """Counts the samples of one engine that missed a goal so far, so that a day ends as soon as it cannot hold."""

    def __init__(self, question: Question, way: Way, arrivals: Sequence[Arrival], engine: SimulatedEngine) -> None:
        part = 1 - question.quantile / 100
        self._engine = engine
        self._late = question.goals.get("ttft", math.inf) - _beside(way, "ttft")
        self._gap = question.goals.get("itl", math.inf)
        self._most_late = part * len(arrivals)
        self._most_gaps = part * sum(arrival.request.stop.max_tokens for arrival in arrivals)
        self._firsts = self._served = 0  # how many were counted
        self._lates = self._gaps = 0

    @staticmethod
    def too_many(misses: Sequence[_Misses]) -> bool:
        """Whether the engines together have missed more than they may in the whole day."""
        for each in misses:
            each.count()
        late, gaps = sum(each._lates for each in misses), sum(each._gaps for each in misses)
        return late > misses[0]._most_late or gaps > misses[0]._most_gaps

    def count(self) -> None:
        """Count what came since the last call."""
        firsts, served = self._engine.firsts, self._engine.served
        self._lates += sum(first > self._late for first in firsts[self._firsts :])
        self._gaps += sum(gap > self._gap for each in served[self._served :] for gap in each.gaps)
        self._firsts, self._served = len(firsts), len(served)


def _met(question: Question, way: Way, served: Sequence[Served], latency: str, bound: float) -> bool:
    values = samples_of(served, latency).values
    return not len(values) or float((values > bound - _beside(way, latency)).mean()) <= 1 - question.quantile / 100


def at_rate(question: Question, machine: Machine, rate: float, seeds: Sequence[int]) -> dict[str, Any]:
    """What clients see at a rate: quantiles of each latency, in milliseconds with intervals, over all seeds.

    Returns:
        (value, low, high) by latency and by name of the quantile.
    """
    served: list[Served] = []
    for seed in seeds:
        fleet, chooser = Fleet(machine.engines(seed)), machine.chooser(seed)
        for arrival in question.arrivals(machine, rate, seed):
            fleet.run(arrival.at)
            fleet.offer(chooser.choose(arrival, fleet.engines), arrival)
        served += _finish(fleet)
    quantiles = sorted({50.0, 90.0, question.quantile})
    found: dict[str, Any] = {}
    for latency in LATENCIES:
        beside = _beside(machine.way, latency)
        of_one = estimates(samples_of(served, latency), quantiles)
        found[latency] = {name: [(value + beside) * 1e3 for value in each] for name, each in of_one.items()}
    return found


def _finish(fleet: Fleet) -> list[Served]:
    fleet.run()
    return [served for engine in fleet.engines for served in engine.served]


def _beside(way: Way, latency: str) -> float:
    """Seconds of a latency that a client sees in addition to the engine's."""
    return {"ttft": way.there + way.back, "e2e": way.there + way.end}.get(latency, 0.0)


def _streams(served: Sequence[Served]) -> float:
    """Mean number of requests under way at once, from the first arrival to the last (Little 1961)."""
    over = max(each.arrived for each in served) - min(each.arrived for each in served)
    return sum(each.end_to_end for each in served) / over if over > 0 else float(len(served))


def variants(machine: Machine) -> dict[str, Machine]:
    """The machines to compare a machine with, by name: other options, more memory, and a second machine."""
    config = machine.config
    found: dict[str, Machine] = {}

    def other(name: str, **changes: Any) -> None:
        try:
            changed = replace(config, **changes)
        except ConfigError:
            return  # this option contradicts the others
        if changed != config:
            found[name] = replace(machine, config=changed)

    for seqs in (32, 128):
        other(f"--max-num-seqs {seqs}", max_num_seqs=seqs)
    for milliseconds in (50, 200):
        other(f"--step-target-ms {milliseconds}", step_target_ms=milliseconds)
    for tokens in (128, 512):
        other(f"--max-num-batched-tokens {tokens}", max_num_batched_tokens=tokens)
    other("twice the KV memory", num_blocks=config.num_blocks * 2)
    found["a second machine, requests in turn"] = replace(machine, replicas=2)
    found["a second machine, requests by prefix"] = replace(machine, replicas=2, routed=True)
    return found


def spread(values: Sequence[float]) -> Estimate:
    """The median, the lowest and the highest."""
    return Estimate(statistics.median(values), min(values), max(values))


def drawn(name: str) -> Drawn:
    """The drawn workload of this name.

    Raises:
        ConfigError: there is no workload of this name.
    """
    if name not in DRAWN:
        raise ConfigError("workload", f"{name!r} is neither a file nor one of {', '.join(DRAWN)}")
    return DRAWN[name]
