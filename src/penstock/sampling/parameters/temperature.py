"""`temperature`: how flat the distribution is made before a token is drawn; 0 is greedy.

Softmax with temperature: Ackley, Hinton and Sejnowski, "A learning algorithm for Boltzmann machines" (1985), section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, Stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GREEDY", "PARAMETER", "apply"]

GREEDY = 0.0
"""The temperature that stands for "always the most likely token"; the sampler never divides by it."""

_SMALLEST_NORMAL = 2.0**-126  # of float32; subnormal divisors might be flushed to zero


def apply(logits: Tensor, values: Tensor) -> Tensor:
    """Logits `[R, V]` over temperatures `[R, 1]`, all above 0.

    The maximum is subtracted first, which does not change the softmax: the top token stays at exactly 0 and the others
    go to -inf at worst, so that the smallest temperature gives the greedy distribution and no NaN.
    """
    scale = values.to(device=logits.device, dtype=logits.dtype).clamp(min=_SMALLEST_NORMAL)  # [R, 1]
    return (logits - logits.amax(-1, keepdim=True)) / scale


PARAMETER = Parameter(
    name="temperature",
    kind=Number(0.0, 2.0),
    default=1.0,
    neutral=1.0,
    nullable=False,
    home=Home.SPEC,
    field="temperature",
    doc="Divide the logits by this: the higher, the more random the choice. 0 always takes the most likely token (the"
    " lowest id if several tie), and makes top_k, top_p, min_p and seed irrelevant.",
    stages=(Stage(10, apply),),
    from_model=True,
)
