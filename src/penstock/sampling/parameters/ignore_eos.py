"""`ignore_eos`: go on past the end-of-sequence ids of the model."""

from __future__ import annotations

from penstock.sampling.kinds import Flag
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="ignore_eos",
    kind=Flag(),
    default=False,
    neutral=False,
    nullable=False,
    home=Home.STOP_RULES,
    field="ignore_eos",
    doc="Do not end the completion at the model's own end-of-sequence ids.",
)
