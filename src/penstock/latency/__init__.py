"""Where a request's time went: every moment of its life in one part, from what the engine's thread saw. Pure."""

from penstock.latency.book import LatencyBook

__all__ = ["LatencyBook"]
