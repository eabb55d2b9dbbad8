"""`dry_penalty_last_n`: how far back `dry_multiplier` looks for repetitions."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="dry_penalty_last_n",
    kind=Integer(-1, 2**31 - 1),
    default=-1,
    neutral=-1,
    nullable=False,
    home=Home.SPEC,
    field="dry_penalty_last_n",
    doc="Let dry_multiplier look at only this many of the last tokens; -1 is all of them, 0 none.",
)
