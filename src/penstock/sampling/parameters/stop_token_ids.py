"""`stop_token_ids`: token ids that end a choice, beside the end-of-sequence ids of the model."""

from __future__ import annotations

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Integers
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

PARAMETER = Parameter(
    name="stop_token_ids",
    kind=Integers(DEFAULT_LIMITS.max_stop_token_ids, 0, 2**31 - 1),
    default=None,
    neutral=(),
    nullable=True,
    home=Home.STOP_RULES,
    field="token_ids",
    doc="End the completion at any of these token ids, in addition to the model's own end-of-sequence ids.",
)
