"""`repeat_last_n`: how far back the repetition, frequency and presence penalties look."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="repeat_last_n",
    kind=Integer(-1, 2**31 - 1),
    default=-1,
    neutral=-1,
    nullable=False,
    home=Home.SPEC,
    field="repeat_last_n",
    doc="Let repetition_penalty, frequency_penalty and presence_penalty look at only this many of the last tokens; -1"
    " is all of them, 0 none.",
)
