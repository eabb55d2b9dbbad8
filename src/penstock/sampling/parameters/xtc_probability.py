"""`xtc_probability`: "exclude top choices", how often the most likely tokens are excluded.

p-e-w, "Exclude Top Choices (XTC): a sampler that boosts creativity" (2024), the proposal that llama.cpp and others
implement: with this probability, only the least likely of all tokens that are at least `xtc_threshold` likely stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, RowStage
from penstock.sampling.parameters.xtc_threshold import THRESHOLD

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.sampling.row_views import RowViews

__all__ = ["COIN", "PARAMETER", "apply"]

COIN = 1
"""The purpose (see `uniform`) of the random number that decides whether the exclusion applies to a token's choice."""


def apply(logits: Tensor, rows: RowViews) -> Tensor:
    """`[R, V]` without the tokens above the threshold, except for the least likely of them and those tied with it."""
    device = logits.device
    struck = (rows.uniform(COIN) < rows.column("xtc_probability", 0.0)).to(device)  # [R, 1]
    threshold = rows.column("xtc_threshold", THRESHOLD).to(device)  # [R, 1] float64
    probabilities = logits.double().softmax(-1)  # a large vocabulary does not add up to 1 in float32
    top = probabilities >= threshold  # [R, V]
    least = probabilities.masked_fill(~top, float("inf")).amin(-1, keepdim=True)  # [R, 1]
    return logits.masked_fill(struck & top & (probabilities > least), float("-inf"))


PARAMETER = Parameter(
    name="xtc_probability",
    kind=Number(0.0, 1.0),
    default=0.0,
    neutral=0.0,
    nullable=False,
    home=Home.SPEC,
    field="xtc_probability",
    doc="Exclude the most likely tokens with this probability: all that are at least xtc_threshold likely, except the"
    " least likely of them. 0 is off.",
    stages=(RowStage(50, apply),),
    random_only=True,
)
