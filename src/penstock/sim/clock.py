"""A simulated clock: it stands still until it is advanced. Implements the port `Clock`."""

from __future__ import annotations

__all__ = ["SimClock"]


class SimClock:
    """Seconds that pass only by `advance`. Owned by the test or simulation that made it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: `seconds` is negative.
        """
        if not seconds >= 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        self._now += seconds
