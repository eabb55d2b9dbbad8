"""`frequency_penalty`: a token becomes less likely each time that it is generated.

OpenAI, API reference of chat completions: the logit is lowered by the penalty times the token's count in the output.
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
    """`[R, V]` minus penalty times how often the token was generated within the row's window."""
    starts = rows.window("repeat_last_n").max(rows.prompt_ends)
    counts = rows.counts(logits.shape[-1], starts).to(logits.device)  # [R, V]
    return logits - counts * rows.column("frequency_penalty", 0.0).to(device=logits.device, dtype=logits.dtype)


PARAMETER = Parameter(
    name="frequency_penalty",
    kind=Number(-2.0, 2.0),
    default=0.0,
    neutral=0.0,
    nullable=True,
    home=Home.SPEC,
    field="frequency_penalty",
    doc="Lower a token's logit by this much for each time it has been generated; the prompt does not count. 0 is off.",
    stages=(RowStage(5, apply),),
)
