"""`n`: how many choices are generated from one prompt."""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="n",
    kind=Integer(1, DEFAULT_LIMITS.max_choices),
    default=1,
    neutral=1,
    nullable=False,
    home=Home.REQUEST,
    field="n",
    doc="Generate this many completions of the prompt; each draws its own random numbers.",
)
