"""`stop`: texts that end a choice."""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Strings
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="stop",
    kind=Strings(DEFAULT_LIMITS.max_stop_strings, DEFAULT_LIMITS.max_stop_string_chars),
    default=None,
    neutral=(),
    nullable=True,
    home=Home.STOP_RULES,
    field="strings",
    doc="End the completion when one of these strings appears in it: one string or a list. The match and everything"
    " after it are cut off.",
)
