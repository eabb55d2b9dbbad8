"""Estimates how long a request stays with a replica, from counts alone: Little's law (Little 1961).

The mean time in a system is the mean number in it over the rate of departures, so no single request has to be followed.
"""

from __future__ import annotations

__all__ = ["Stay"]

_REMEMBERED = 512.0
"""Number of ended requests after which earlier ones count half as much."""


class Stay:
    """Mean seconds from `sent` to `ended`, of about the last thousand requests.

    Args:
        seconds: the guess before anything has ended.
    """

    __slots__ = ("_area", "_ends", "_inside", "_since")

    def __init__(self, seconds: float) -> None:
        self._area = seconds  # request-seconds spent inside
        self._ends = 1.0
        self._inside = 0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The mean, between a millisecond and an hour."""
        return min(max(self._area / self._ends, 1e-3), 3600.0)

    def began(self, now: float) -> None:
        """Note that a request was sent."""
        self._pass_to(now)
        self._inside += 1

    def ended(self, now: float, count: int = 1) -> None:
        """Note that `count` requests are over, in whatever way."""
        self._pass_to(now)
        self._inside = max(0, self._inside - count)
        self._ends += count
        if self._ends > _REMEMBERED * 2:
            self._ends /= 2
            self._area /= 2

    def _pass_to(self, now: float) -> None:
        if self._since is not None and 0.0 < now - self._since <= 3600.0:
            self._area += self._inside * (now - self._since)
        self._since = now
