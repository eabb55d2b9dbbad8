"""How long a step may take before it counts as hung: a few times as long as earlier steps, but at least some seconds.

A step is expected to take at most the longest time per position so far, times its own number of positions.
Steps get slower as their context grows, but only little from one step to the next.
"""

from __future__ import annotations

from penstock.contract.plan import StepPlan

__all__ = ["HangLimit"]

_LEAST = 4.0
_TIMES = 3.0
_FIRST = 120.0
"""Seconds for the first step, whose pages may still come from disk; also a cap on the estimate by positions."""


class HangLimit:
    """Tracks the slowest steps so far. Owned by a runner, or by a watchdog."""

    def __init__(self) -> None:
        self._longest = 0.0  # seconds of the longest step
        self._slowest = 0.0  # seconds per position

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """Record a step. One that also read stored blocks is ignored: it does not tell the time per position."""
        if plan.num_tokens and not plan.num_restored:
            self._longest = max(self._longest, seconds)
            self._slowest = max(self._slowest, seconds / plan.num_tokens)

    def of(self, plan: StepPlan | None) -> float:
        """Seconds after which a step (None: an order that computes nothing) counts as hung."""
        if not self._longest:
            return _FIRST
        positions = 0 if plan is None else plan.num_tokens
        return max(_LEAST, _TIMES * min(self._slowest * positions, _FIRST), _TIMES * self._longest)
