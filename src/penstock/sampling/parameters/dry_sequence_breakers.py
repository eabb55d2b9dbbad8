"""`dry_sequence_breakers`: texts that interrupt a repetition for `dry_multiplier`.

At admission they become the ids of all tokens whose text contains one of them.
"""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Strings
from penstock.sampling.parameter import Home, Parameter

__all__ = ["BREAKERS", "PARAMETER"]

BREAKERS = ("\n", ":", '"', "*")

PARAMETER = Parameter(
    name="dry_sequence_breakers",
    kind=Strings(DEFAULT_LIMITS.max_sequence_breakers, DEFAULT_LIMITS.max_sequence_breaker_chars),
    default=None,
    neutral=BREAKERS,
    nullable=True,
    home=Home.SPEC,
    field="dry_sequence_breakers",
    doc="End a repetition, for dry_multiplier, at every token whose text contains one of these texts; by default line"
    " break, colon, quotation mark and asterisk.",
)
