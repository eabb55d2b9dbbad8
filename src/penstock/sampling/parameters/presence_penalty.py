"""`presence_penalty`: a token that was generated before becomes less likely, no matter how often.

OpenAI, API reference of chat completions: the logit is lowered by the penalty if the token is in the output.
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
    """`[R, V]` minus the penalty where the token was generated within the row's window."""
    starts = rows.window("repeat_last_n").max(rows.prompt_ends)
    present = rows.counts(logits.shape[-1], starts).clamp(max=1).to(logits.device)  # [R, V]
    return logits - present * rows.column("presence_penalty", 0.0).to(device=logits.device, dtype=logits.dtype)


PARAMETER = Parameter(
    name="presence_penalty",
    kind=Number(-2.0, 2.0),
    default=0.0,
    neutral=0.0,
    nullable=True,
    home=Home.SPEC,
    field="presence_penalty",
    doc="Lower a token's logit by this much if it has been generated already; the prompt does not count. 0 is off.",
    stages=(RowStage(6, apply),),
)
