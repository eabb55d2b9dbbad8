"""`min_tokens`: how many tokens are generated before anything may stop a choice."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="min_tokens",
    kind=Integer(0, 2**31 - 1),
    default=0,
    neutral=0,
    nullable=False,
    home=Home.STOP_RULES,
    field="min_tokens",
    doc="Do not let a stop token, a stop string or repetition_detection end the completion before it has this many"
    " tokens.",
)
