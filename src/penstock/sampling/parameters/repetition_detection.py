"""`repetition_detection`: ends a completion that runs into a loop (vLLM's parameter of this name)."""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import LoopRule
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="repetition_detection",
    kind=LoopRule(DEFAULT_LIMITS.max_repetition_pattern, DEFAULT_LIMITS.max_repetition_count),
    default=None,
    neutral=(),
    nullable=True,
    home=Home.STOP_RULES,
    field="repetition",
    doc="End the completion, with finish reason repetition, once its last tokens are min_count copies of one pattern"
    " of min_pattern_size (default 1) to max_pattern_size tokens.",
)
