"""Where a request's time went: puts each moment of its life in one part, from what the engine's thread saw. Pure."""

from penstock.latency.book import LatencyBook
from penstock.latency.division import StepShares

__all__ = ["LatencyBook", "StepShares"]
