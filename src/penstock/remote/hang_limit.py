"""How long a step may take before it counts as hung: a few times what its like have taken, and never less than seconds.

Goes by positions: a step's time is at most what the slowest step so far took for each of its own. Steps grow slower
with the length of what they attend to, but from one to the next by little.
"""

from __future__ import annotations

from penstock.contract.plan import StepPlan

__all__ = ["HangLimit"]

_LEAST = 4.0
_TIMES = 3.0
_FIRST = 120.0
"""Seconds for a step of which nothing is known: the first one, which pages may still come from a disk for."""


class HangLimit:
    """Knows the slowest steps so far. Owned by a runner, or by who watches one."""

    def __init__(self) -> None:
        self._longest = 0.0  # seconds of a step
        self._slowest = 0.0  # seconds a position

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed. One that also read stored blocks says nothing of what a position takes."""
        if plan.num_tokens and not plan.num_restored:
            self._longest = max(self._longest, seconds)
            self._slowest = max(self._slowest, seconds / plan.num_tokens)

    def of(self, plan: StepPlan | None) -> float:
        """Seconds after which a step (None: an order that computes nothing) has hung."""
        if not self._longest:
            return _FIRST
        positions = 0 if plan is None else plan.num_tokens
        return max(_LEAST, _TIMES * min(self._slowest * positions, _FIRST), _TIMES * self._longest)
