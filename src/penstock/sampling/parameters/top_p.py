"""`top_p`: nucleus sampling, the smallest set of the most likely tokens that together hold probability p.

Holtzman, Buys, Du, Forbes and Choi, "The curious case of neural text degeneration" (2019), section 3.1: the token with
which the sum reaches p belongs to the set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, Stage
from penstock.sampling.row_sums import running_sums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PARAMETER", "apply"]

_FIRST_LOOK = 256
"""Tokens that are sorted at first: most nuclei are smaller, and a whole vocabulary costs twenty times more."""


def apply(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the nucleus of each row of `[R, V]` for p in `[R, 1]`; tokens as likely as its last one stay too.

    Whether a row needs the full sort depends on that row alone, and both ways add up the same numbers in one order.
    """
    p = values.to(logits.device)  # [R, 1] float64
    probabilities = logits.double().softmax(-1)  # [R, V]; a large vocabulary does not add up to 1 in float32
    width = min(_FIRST_LOOK, logits.shape[-1])
    threshold, reached = _last_of_nucleus(probabilities.topk(width, dim=-1).values, p)  # [R, 1], [R]
    wide = (~reached).nonzero().squeeze(-1)  # rows whose nucleus is larger
    if wide.numel() and width < logits.shape[-1]:
        everything = probabilities[wide].sort(-1, descending=True).values
        threshold[wide] = _last_of_nucleus(everything, p[wide])[0]
    return logits.masked_fill(probabilities < threshold, float("-inf"))


def _last_of_nucleus(descending: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest probability `[R, 1]` within the nucleus, and whether the sum `[R]` reached p at all."""
    sums = running_sums(descending)  # [R, W]
    size = 1 + (sums[:, :-1] < p).sum(-1, keepdim=True)  # [R, 1]: a token is in if the tokens before it do not reach p
    return descending.gather(-1, size - 1), sums[:, -1] >= p.squeeze(-1)


PARAMETER = Parameter(
    name="top_p",
    kind=Number(0.0, 1.0, excludes_low=True),
    default=1.0,
    neutral=1.0,
    nullable=False,
    home=Home.SPEC,
    field="top_p",
    doc="Draw only from the smallest set of the most likely tokens whose probabilities add up to at least this; the"
    " set includes the token that reaches it. 1 takes all.",
    stages=(Stage(30, apply),),
    random_only=True,
    from_model=True,
)
