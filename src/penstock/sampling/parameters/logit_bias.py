"""`logit_bias`: numbers added to the logits of chosen tokens (OpenAI, API reference of chat completions)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import TokenBiases
from penstock.sampling.parameter import Home, Parameter, RowStage

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.sampling.row_views import RowViews

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, rows: RowViews) -> Tensor:
    """`[R, V]` plus each row's biases."""
    no_biases: tuple[tuple[int, float], ...] = ()
    biases = [(row, *bias) for row, spec in enumerate(rows.specs) for bias in spec.get("logit_bias", no_biases)]
    at, ids, amounts = zip(*biases, strict=True)
    where = (rows.ends.new_tensor(at).to(logits.device), rows.ends.new_tensor(ids).to(logits.device))
    return logits.index_put(where, logits.new_tensor(amounts), accumulate=True)  # no token occurs twice in one row


PARAMETER = Parameter(
    name="logit_bias",
    kind=TokenBiases(DEFAULT_LIMITS.max_logit_biases, 100.0),
    default=None,
    neutral=(),
    nullable=True,
    home=Home.SPEC,
    field="logit_bias",
    doc="Add numbers to the logits of tokens: an object of token ids (as strings) and numbers from -100 to 100.",
    stages=(RowStage(3, apply),),
)
