"""How soon running requests end: this tells refused callers when to try again."""

from __future__ import annotations

from collections import deque

__all__ = ["LONGEST", "EndRate"]

WINDOW = 64
"""How many ends are remembered: enough to smooth, few enough to follow a change of load."""

LONGEST = 120
"""Seconds; clients of the OpenAI family do not wait longer than this before they retry."""


class EndRate:
    """Estimates from how long the last requests held a slot, so a pause without requests does not count as slowness."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=WINDOW)

    def ended(self, seconds: float) -> None:
        """A request ended `seconds` after it was admitted; one that was never admitted gives 0.0 and is ignored."""
        if seconds > 0:
            self._held.append(seconds)

    def seconds_until(self, ends: int, running: int) -> float:
        """Seconds until `ends` requests have ended if `running` run at once; 0.0 while nothing is known."""
        if not self._held:
            return 0.0
        return ends * sum(self._held) / len(self._held) / max(1, running)
