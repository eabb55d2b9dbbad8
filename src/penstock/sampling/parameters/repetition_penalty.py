"""`repetition_penalty`: tokens that occur in the prompt or the output become less likely, no matter how often.

Keskar, McCann, Varshney, Xiong and Socher, "CTRL: a conditional transformer language model for controllable generation"
(2019), section 4.1; a negative logit is multiplied instead of divided, so that it falls too, as in later code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, RowStage

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.sampling.row_views import RowViews

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, rows: RowViews) -> Tensor:
    """`[R, V]` with the logits of seen tokens divided by the row's penalty, or multiplied where they are negative."""
    seen = rows.counts(logits.shape[-1], rows.window("repeat_last_n")).to(logits.device) > 0  # [R, V]
    penalty = rows.column("repetition_penalty", 1.0).to(device=logits.device, dtype=logits.dtype)  # [R, 1]
    penalised = (logits / penalty).where(logits > 0, logits * penalty)
    return penalised.where(seen, logits)


PARAMETER = Parameter(
    name="repetition_penalty",
    kind=Number(0.01, 10.0),
    default=1.0,
    neutral=1.0,
    nullable=True,
    home=Home.SPEC,
    field="repetition_penalty",
    doc="Make tokens of the prompt and the output less likely (above 1) or more likely (below 1). 1 is off.",
    stages=(RowStage(4, apply),),
    from_model=True,
)
