"""How long a step takes in a simulation, and the engine's work between two steps: as measured, with their scatter.

The expected time of a step is what `core.step_time` has learned. That model is a sum of parts, and real machines
deviate from it. The ratios of measured to expected time are kept by the shape of the step, and a simulation draws from
them. This corrects the sum at each shape on average, and the simulation scatters as the machine did. The time between a
step's own seconds and the next plan is drawn from measurements beside steps of the same shape.

What all steps of a second had in common is the machine's pace (`pace`): it is not drawn, but follows the measurement.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from penstock.contract.plan import StepPlan
from penstock.core.step_time import Amounts, Chunks, StepTimes
from penstock.foresight.pace import Pace

__all__ = ["CostDraws", "CostLearner", "Rest", "StepCosts"]

_FEW = 12
"""A shape with fewer measurements is not drawn from: its nearest neighbour with enough of them is."""

Shape = tuple[int, int]
"""(rows that decode, positions of prompts), both in powers of two."""

T = TypeVar("T")


class Rest(NamedTuple):
    """The time that passes besides a step's own seconds.

    Attributes:
        around: from its plan to its result, less the seconds that the runner measured.
        after: from its result to the next plan.
    """

    around: float
    after: float


class Measurements(Generic[T]):
    """Measurements by shape."""

    def __init__(self, measured: Iterable[tuple[Shape, T]]) -> None:
        self._by_shape: dict[Shape, list[T]] = {}
        for shape, value in measured:
            self._by_shape.setdefault(shape, []).append(value)
        self._usable = [shape for shape, values in self._by_shape.items() if len(values) >= _FEW]
        self._usable = self._usable or list(self._by_shape)
        self._nearest: dict[Shape, Shape] = {}

    def __bool__(self) -> bool:
        return bool(self._usable)

    def near(self, shape: Shape) -> list[T]:
        """The measurements of the shape nearest to this one that has enough measurements."""
        found = self._nearest.get(shape)
        if found is None:
            found = min(self._usable, key=lambda each: (_distance(each, shape), each))
            self._nearest[shape] = found
        return self._by_shape[found]


class StepCosts:
    """How long steps take, as measured in one run.

    Args:
        times: the model of step times: the parts of a step.
        scatter: measured seconds as a multiple of the expected seconds at the machine's pace.
        rests: the time that passes besides the steps' own seconds.
        wake: seconds from a request's arrival until an idle engine plans.
        pace: the machine's pace, by the time since the first arrival.
    """

    def __init__(
        self,
        times: StepTimes,
        scatter: Measurements[float],
        rests: Measurements[Rest],
        wake: float = 0.0,
        pace: Pace | None = None,
    ) -> None:
        self.times = times
        self.scatter = scatter
        self.rests = rests
        self.wake = wake
        self.pace = pace or Pace()

    def expected(self, plan: StepPlan) -> tuple[Shape, float]:
        """The shape of a step, and the seconds that it is expected to take."""
        step = self.times.amounts(plan)
        return _shape(step), self.times.of_step(step)


class CostDraws:
    """Draws how long each step of one simulated engine takes. Owned by that engine.

    Args:
        costs: how long steps take.
        seed: the same seed and plans give the same seconds.
        part: where in the measured time the machine's pace begins, as a share in 0..1; None to draw it. With 0 a
            recorded day has at each time the pace that it had.
    """

    def __init__(self, costs: StepCosts, seed: int, part: float | None = None) -> None:
        self._costs = costs
        self._rng = random.Random(f"{seed}/costs")  # noqa: S311 (a simulation, no secret)
        self._offset = (self._rng.random() if part is None else part) * costs.pace.seconds

    def draw(self, plan: StepPlan, began: float) -> tuple[float, Rest]:
        """Seconds by the runner's clock of a step that begins at a time, and the time that passes besides them."""
        costs = self._costs
        shape, seconds = costs.expected(plan)
        if costs.scatter:
            seconds *= self._pace(began) * self._one_of(costs.scatter.near(shape))
        rest = self._one_of(costs.rests.near(shape)) if costs.rests else Rest(0.0, 0.0)
        return seconds, rest

    def draw_ahead(self, starts: list[int], steps: int, began: float) -> list[float]:
        """When successive steps begin in which the same rows decode, one position further in each step.

        Args:
            starts: the positions of the rows in the first step.
            steps: how many steps.
            began: when the first step begins.

        Returns:
            `steps` + 1 times: the last is when the step after them may begin.
        """
        costs, times = self._costs, [began]
        decoding = costs.times.decoding(starts)
        first = costs.times.of(decoding)
        further = costs.times.of(costs.times.decoding([start + 1 for start in starts])) - first
        if not costs.scatter and not costs.rests:
            return [began + step * first + step * (step - 1) / 2 * further for step in range(steps + 1)]
        shape = _shape(Amounts(starts, decoding, Chunks(), 0))
        scatter = costs.scatter.near(shape) if costs.scatter else [1.0]
        rests = costs.rests.near(shape) if costs.rests else [Rest(0.0, 0.0)]
        for step in range(steps):
            now = times[-1]
            seconds = (first + step * further) * self._pace(now) * self._one_of(scatter)
            rest = self._one_of(rests)
            times.append(now + seconds + rest.around + rest.after)
        return times

    def _pace(self, now: float) -> float:
        return self._costs.pace.at(now + self._offset)

    def _one_of(self, values: list[T]) -> T:
        return values[int(self._rng.random() * len(values))]


class _Measured(NamedTuple):
    """A step: when it ended, what it took, and what it was expected to take."""

    at: float
    shape: Shape
    seconds: float
    expected: float


class CostLearner:
    """Learns how long steps take from the steps of a record, in order.

    Args:
        window: see `core.step_time.chunk_of`.
    """

    def __init__(self, window: int | None) -> None:
        self._times = StepTimes(window)
        self._steps: list[tuple[float, Amounts, float]] = []
        self._rests: list[tuple[Shape, Rest]] = []
        self.wakes: list[float] = []

    def step(self, plan: StepPlan, seconds: float, at: float) -> Shape:
        """Learn from a step that took `seconds` and ended `at` seconds after the first arrival. Returns its shape."""
        self._times.learn(plan, seconds)
        step = self._times.amounts(plan)
        if 0.0 < seconds < float("inf"):  # steps that draw nothing too: whatever they leave undone, others take
            self._steps.append((at, step, seconds))
        return _shape(step)

    def rest(self, shape: Shape, rest: Rest) -> None:
        """Learn the time that passed besides a step of that shape; the engine must have gone on at once."""
        self._rests.append((shape, rest))

    def costs(self) -> StepCosts:
        """What was learned. Expected times of all steps come from what is known at the end."""
        steps = [_Measured(at, _shape(step), seconds, self._times.of_step(step)) for at, step, seconds in self._steps]
        steps = [step for step in steps if step.expected > 0]
        by_shape: dict[Shape, list[_Measured]] = {}
        for step in steps:
            by_shape.setdefault(step.shape, []).append(step)
        # What the sum of parts misses at a shape must not count as the machine's pace.
        usual = {shape: sum(s.seconds for s in of) / sum(s.expected for s in of) for shape, of in by_shape.items()}
        pace = Pace((step.at, step.seconds, step.expected * usual[step.shape]) for step in steps)
        scatter = [(step.shape, step.seconds / step.expected / pace.at(step.at)) for step in steps]
        wakes = sorted(self.wakes)
        wake = wakes[len(wakes) // 2] if wakes else 0.0
        return StepCosts(self._times, Measurements(scatter), Measurements(self._rests), wake, pace)


def _shape(step: Amounts) -> Shape:
    return len(step.starts).bit_length(), int(step.chunks.positions).bit_length()


def _distance(one: Shape, other: Shape) -> int:
    """How unlike two shapes are; a step with prompts is far from a step without."""
    apart = abs(one[0] - other[0]) + abs(one[1] - other[1])
    return apart + 8 * ((one[1] == 0) != (other[1] == 0))
