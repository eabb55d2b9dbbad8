"""Counts values into intervals: vLLM's intervals if vLLM has such a metric, so that dashboards line up."""

from __future__ import annotations

from bisect import bisect_left

from penstock.contract.measurements import Histogram

__all__ = [
    "CHOICES",
    "FIRST_TOKEN",
    "PHASES",
    "PREEMPTIONS",
    "SHARES",
    "STEP_TOKENS",
    "TOKEN_GAP",
    "HistogramBuilder",
    "lengths_up_to",
]

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
PHASES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


def lengths_up_to(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`, at least 1."""
    edges: list[float] = []
    scale = 1
    while scale <= longest:
        edges += [float(digit * scale) for digit in (1, 2, 5) if digit * scale <= longest]
        scale *= 10
    return tuple(edges)


class HistogramBuilder:
    """Counts values, and makes a `Histogram` of the counts. Has one owner, the metrics collector."""

    __slots__ = ("_counts", "_edges", "_frozen", "_total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0
        self._frozen: Histogram | None = None

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value
        self._frozen = None

    def histogram(self) -> Histogram:
        """All counts so far; the same object as before if nothing was added."""
        if self._frozen is None:
            self._frozen = Histogram(self._edges, tuple(self._counts), self._total)
        return self._frozen
