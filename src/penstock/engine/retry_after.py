"""How fast requests finish, from which rejected callers learn when to try again."""

from __future__ import annotations

import math
from collections import deque

from penstock.contract.ports import Clock

__all__ = ["RetryAfterEstimator"]

WINDOW = 64
"""How many finishes are remembered: enough to smooth, few enough to follow a change of load."""

LONGEST = 120
"""Seconds; clients of the OpenAI family do not wait longer than this before they retry."""


class RetryAfterEstimator:
    """Estimates from the rate of the last finishes. Owned by the engine's loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._finishes: deque[float] = deque(maxlen=WINDOW)

    def finished_one(self) -> None:
        """A request is complete."""
        self._finishes.append(self._clock.now())

    def seconds_for(self, waiting: int) -> int:
        """Whole seconds until about `waiting` requests have finished, in 1..120; 1 while nothing is known."""
        if len(self._finishes) < 2:
            return 1
        span = self._clock.now() - self._finishes[0]
        return max(1, min(LONGEST, math.ceil(waiting * span / len(self._finishes))))
