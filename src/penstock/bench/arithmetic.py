"""The statistics in reports: percentiles, and medians with their spread.

Decides how samples are summarised. Does not know where they come from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PERCENTILES", "Spread", "percentile", "percentiles"]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing: the median, the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample."""
        if not samples:
            raise ValueError("no samples")
        return cls(statistics.median(samples), min(samples), max(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of the samples lie.

    Interpolates linearly between the two nearest ranks: method 7 of Hyndman and Fan, "Sample Quantiles in Statistical
    Packages" (1996), which is numpy's default too.

    Raises:
        ValueError: there are no samples, or `percent` lies outside 0..100.
    """
    if not samples:
        raise ValueError("no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} lies outside 0..100")
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles by name: mean, p50, p90, p95, p99. Empty when there are no samples."""
    if not samples:
        return {}
    return {"mean": statistics.fmean(samples)} | {f"p{each}": percentile(samples, each) for each in PERCENTILES}
