"""`dry_base`: how fast the penalty of `dry_multiplier` grows with the length of a repetition."""

from __future__ import annotations

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter

__all__ = ["BASE", "PARAMETER"]

BASE = 1.75

PARAMETER = Parameter(
    name="dry_base",
    kind=Number(1.0, 8.0),
    default=BASE,
    neutral=BASE,
    nullable=False,
    home=Home.SPEC,
    field="dry_base",
    doc="Multiply the penalty of dry_multiplier by this for each further repeated token.",
)
