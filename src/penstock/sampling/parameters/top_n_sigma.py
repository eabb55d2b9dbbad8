"""`top_n_sigma`: only tokens whose logit lies within n standard deviations of the largest.

Tang, Liu, Zhang and others, "Top-n-sigma: not all logits are you need" (2024), section 3.2. The deviation is
taken over the logits that are not ruled out. Temperature scales all logits equally, so it does not change which tokens
stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, Stage
from penstock.sampling.row_sums import row_sums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, values: Tensor) -> Tensor:
    """Keep, in each row of `[R, V]`, the logits within `values` `[R, 1]` standard deviations of the row's largest."""
    n = values.to(logits.device)  # [R, 1] float64
    alive = logits.isfinite()
    below = (logits.double() - logits.double().amax(-1, keepdim=True)).masked_fill(~alive, 0.0)  # [R, V], at most 0
    count = alive.sum(-1, keepdim=True)  # [R, 1], of integers: exact in any order
    mean = row_sums(below) / count
    variance = row_sums((below - mean).square().masked_fill(~alive, 0.0)) / count
    return logits.masked_fill(below < -n * variance.sqrt(), float("-inf"))


PARAMETER = Parameter(
    name="top_n_sigma",
    kind=Number(0.0, 100.0),
    default=0.0,
    neutral=0.0,
    nullable=False,
    home=Home.SPEC,
    field="top_n_sigma",
    doc="Draw only from tokens whose logit lies at most this many standard deviations below the largest; 0 is off.",
    stages=(Stage(15, apply),),
    random_only=True,
)
