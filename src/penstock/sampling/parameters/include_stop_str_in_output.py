"""`include_stop_str_in_output`: keep the stop string that ended a choice."""

from __future__ import annotations

from penstock.sampling.kinds import Flag
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="include_stop_str_in_output",
    kind=Flag(),
    default=False,
    neutral=False,
    nullable=False,
    home=Home.STOP_RULES,
    field="include_stop_string",
    doc="Keep the stop string that ended the completion in its text.",
)
