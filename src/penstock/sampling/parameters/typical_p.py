"""`typical_p`: only tokens whose surprise is closest to the expected one, as many as together hold probability p.

Meister, Pimentel, Wiher and Cotterell, "Locally typical sampling" (2022), section 3, equation 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, Stage
from penstock.sampling.row_sums import row_sums, running_sums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the typical set of each row of `[R, V]` for p in `[R, 1]`; tokens as typical as its last one stay too."""
    p = values.to(logits.device)  # [R, 1] float64
    log_p = logits.double().log_softmax(-1)  # [R, V]
    probabilities = log_p.exp()
    terms = (probabilities * log_p).masked_fill(probabilities == 0, 0.0)
    entropy = -row_sums(terms)  # [R, 1]
    distance = (log_p + entropy).abs()  # between surprise and entropy; infinite for ruled-out tokens
    order = distance.argsort(dim=-1, stable=True)
    before = running_sums(probabilities.gather(-1, order))[:, :-1]
    size = 1 + (before < p).sum(-1, keepdim=True)  # a token is in if the tokens before it do not reach p
    last = distance.gather(-1, order.gather(-1, size - 1))  # [R, 1]
    return logits.masked_fill(distance > last, float("-inf"))


PARAMETER = Parameter(
    name="typical_p",
    kind=Number(0.0, 1.0, excludes_low=True),
    default=1.0,
    neutral=1.0,
    nullable=False,
    home=Home.SPEC,
    field="typical_p",
    doc="Draw only from the tokens whose surprise is nearest to the expected surprise, as many as it takes to reach"
    " this probability together. 1 takes all.",
    stages=(Stage(25, apply),),
    random_only=True,
    from_model=True,
)
