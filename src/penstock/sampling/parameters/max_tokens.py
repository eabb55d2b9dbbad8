"""`max_tokens`: the most tokens that one choice may have."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="max_tokens",
    kind=Integer(1, 2**31 - 1),
    default=16,
    neutral=None,
    nullable=True,
    home=Home.STOP_RULES,
    field="max_tokens",
    doc="Generate at most this many tokens; null means the rest of the model's context.",
)
