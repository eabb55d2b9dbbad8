"""`thinking_token_budget`: how much the model may think before it answers."""

from __future__ import annotations

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="thinking_token_budget",
    kind=Integer(0, 2**31 - 1),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.REQUEST,
    field="thinking_token_budget",
    doc="Think for at most this many tokens; then the closing tag is written, and the model answers. Only for models"
    " that think; null sets no separate limit.",
)
