"""How fast a machine was, second by second.

Machines have slow moments, when other programs use their processors or memory, and these last: steps of all shapes take
longer then. A simulation that drew each step's slowness independently would have shorter queues than the machine had.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Pace"]

_SECONDS = 1.0
"""How long a pace lasts: long enough for several steps, and shorter than what people notice as a slow moment."""


class Pace:
    """What steps took in each second of a measurement, as a multiple of what such steps took overall. Immutable.

    Args:
        steps: (end, seconds taken, seconds that such a step took overall) of each step, in order; ends in seconds.

    Attributes:
        seconds: the time from the beginning of the first of these seconds to the end of the last.
    """

    def __init__(self, steps: Iterable[tuple[float, float, float]] = ()) -> None:
        took: dict[int, float] = {}
        usual: dict[int, float] = {}
        for at, of_step, of_such in steps:
            second = int(at / _SECONDS)
            took[second] = took.get(second, 0.0) + of_step
            usual[second] = usual.get(second, 0.0) + of_such
        self._first = min(took, default=0)
        self._values: list[float] = []
        for second in range(self._first, max(took, default=-1) + 1):
            before = self._values[-1] if self._values else 1.0  # kept for seconds without steps
            self._values.append(took[second] / usual[second] if usual.get(second) else before)
        self.seconds = len(self._values) * _SECONDS

    def at(self, second: float) -> float:
        """The pace at a time; after the last second the paces repeat from the first."""
        if not self._values:
            return 1.0
        return self._values[(int(second / _SECONDS) - self._first) % len(self._values)]
