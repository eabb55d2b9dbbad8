"""`dry_allowed_length`: how long a repetition may be before `dry_multiplier` penalises it."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["ALLOWED_LENGTH", "PARAMETER"]

ALLOWED_LENGTH = 2

PARAMETER = Parameter(
    name="dry_allowed_length",
    kind=Integer(1, 128),
    default=ALLOWED_LENGTH,
    neutral=ALLOWED_LENGTH,
    nullable=False,
    home=Home.SPEC,
    field="dry_allowed_length",
    doc="Let dry_multiplier penalise only repetitions of at least this many tokens.",
)
