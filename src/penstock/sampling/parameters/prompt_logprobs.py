"""`prompt_logprobs`: whether to return log probabilities of the prompt's tokens, and of how many alternatives."""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="prompt_logprobs",
    kind=Integer(0, DEFAULT_LIMITS.max_logprobs),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.SPEC,
    field="prompt_logprobs",
    doc="Return the log probability of each token of the prompt but the first, and of this many top alternatives,"
    " always from the model's own distribution. The whole prompt is then recomputed, even if it is cached.",
)
