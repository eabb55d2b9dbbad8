"""`logprobs`: whether to return the log probability of each generated token, and of how many alternatives."""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="logprobs",
    kind=Integer(0, DEFAULT_LIMITS.max_logprobs),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.SPEC,
    field="logprobs",
    doc="Return the log probability of each generated token and of this many top alternatives. They come from the"
    " model's own distribution, before temperature and the filters, unless logprobs_mode says otherwise.",
)
