"""`min_p`: tokens far less likely than the top one cannot be drawn.

Nguyen et al., "Turning up the heat: min-p sampling for creative and coherent LLM outputs" (2024), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, Stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, values: Tensor) -> Tensor:
    """Keep, in each row of `[R, V]`, the tokens at least `values` `[R, 1]` times as likely as the top one."""
    probabilities = logits.softmax(-1)  # [R, V]
    share = values.to(device=logits.device, dtype=logits.dtype)  # [R, 1]
    return logits.masked_fill(probabilities < share * probabilities.amax(-1, keepdim=True), float("-inf"))


PARAMETER = Parameter(
    name="min_p",
    kind=Number(0.0, 1.0),
    default=0.0,
    neutral=0.0,
    nullable=False,
    home=Home.SPEC,
    field="min_p",
    doc="Draw only from tokens at least this fraction as likely as the most likely one; 0 takes all.",
    stages=(Stage(40, apply),),
    random_only=True,
    from_model=True,
)
