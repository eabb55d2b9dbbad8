"""Computes quantiles of the latencies of requests, with the intervals in which they lie.

Intervals are from the percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 13):
requests are resampled, each with all gaps between its tokens, because the gaps of one request are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.foresight.arrivals import Served

__all__ = ["LATENCIES", "QUANTILES", "Estimate", "estimates", "figures", "samples_of"]

QUANTILES = (50, 90, 99)
LATENCIES = {
    "queue": "until it begins",
    "ttft": "first token",
    "itl": "between tokens",
    "e2e": "end to end",
}
"""Names of the latencies, and their headings in tables."""

_RESAMPLES = 200
_INSIDE = (2.5, 97.5)
"""Percentiles of the resamples between which the interval lies."""


class Estimate(NamedTuple):
    """A figure, and its 95 % interval."""

    value: float
    low: float
    high: float


class Samples(NamedTuple):
    """Measured values, ascending, and the request that each belongs to."""

    values: Any
    owners: Any
    requests: int


def samples_of(served: Sequence[Served], latency: str) -> Samples:
    """All samples of a latency, in seconds."""
    owners: list[int] = []
    values: list[float] = []
    for owner, each in enumerate(served):
        of_one = _samples(each, latency)
        values += of_one
        owners += [owner] * len(of_one)
    order = np.argsort(np.asarray(values), kind="stable")
    return Samples(np.asarray(values, dtype=float)[order], np.asarray(owners, dtype=int)[order], len(served))


def _samples(served: Served, latency: str) -> list[float]:
    if latency == "itl":
        return served.gaps
    return [{"queue": served.queued, "ttft": served.first_token, "e2e": served.end_to_end}[latency]]


def estimates(samples: Samples, quantiles: Sequence[float] = QUANTILES, seed: int = 0) -> dict[str, Estimate]:
    """Quantiles by name (`p50`), each with its interval; {} if there are no samples."""
    if not len(samples.values):
        return {}
    rng = np.random.default_rng(seed)
    drawn = np.empty((_RESAMPLES, len(quantiles)))
    for row in drawn:
        weights = np.bincount(rng.integers(samples.requests, size=samples.requests), minlength=samples.requests)
        ranks = np.cumsum(weights[samples.owners])
        places = np.searchsorted(ranks, np.asarray(quantiles) / 100 * ranks[-1]) if ranks[-1] else 0
        row[:] = samples.values[np.minimum(places, len(ranks) - 1)]
    low, high = np.percentile(drawn, _INSIDE, axis=0)
    values = np.percentile(samples.values, quantiles)
    return {
        f"p{quantile:g}": Estimate(*map(float, of_one))
        for quantile, of_one in zip(quantiles, zip(values, low, high, strict=True), strict=True)
    }


def figures(served: Sequence[Served], seed: int = 0) -> dict[str, dict[str, Estimate]]:
    """The quantiles of every latency, in seconds."""
    return {latency: estimates(samples_of(served, latency), seed=seed) for latency in LATENCIES}
