"""`xtc_threshold`: how likely a token must be to be excluded by `xtc_probability`."""

from __future__ import annotations

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER", "THRESHOLD"]

THRESHOLD = 0.1

PARAMETER = Parameter(
    name="xtc_threshold",
    kind=Number(0.0, 1.0),
    default=THRESHOLD,
    neutral=THRESHOLD,
    nullable=False,
    home=Home.SPEC,
    field="xtc_threshold",
    doc="Count tokens at least this likely among the most likely for xtc_probability; above 0.5 there are never two.",
    random_only=True,
)
