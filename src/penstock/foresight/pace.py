"""How fast a machine was, second by second.

Machines have slow moments, when other programs use their processors or memory, and these last: steps of all shapes take
longer then. A simulation in which each step is slow or quick by itself has shorter queues than there were.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Pace"]

_SECONDS = 1.0
"""How long a pace is kept: long enough for several steps, and shorter than what people notice as a slow moment."""


class Pace:
    """What steps took in each second of a measurement, as a multiple of what they took on the whole. Immutable.

    Args:
        steps: when each ended, in seconds, in order; what it took, and what such a step took on the whole.

    Attributes:
        seconds: the time from the first of these seconds to the end of the last.
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
            before = self._values[-1] if self._values else 1.0  # as before, while there was nothing to do
            self._values.append(took[second] / usual[second] if usual.get(second) else before)
        self.seconds = len(self._values) * _SECONDS

    def at(self, second: float) -> float:
        """The pace at a time; behind the last second comes the first one."""
        if not self._values:
            return 1.0
        return self._values[(int(second / _SECONDS) - self._first) % len(self._values)]
