"""`best_of`: how many choices are generated; the best `n` are returned.

OpenAI, API reference of completions: the best are "the ones with the highest log probability per token".
"""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="best_of",
    kind=Integer(1, DEFAULT_LIMITS.max_choices),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.REQUEST,
    field="best_of",
    doc="Generate this many completions, at least n, and return the n whose tokens have the highest mean log"
    " probability, best first; all count as usage. Above n, not together with streaming.",
)
