"""`top_k`: only the k most likely tokens can be drawn.

Fan, Lewis and Dauphin, "Hierarchical neural story generation" (2018), section 5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.sampling.kinds import Integer
from penstock.sampling.parameter import Home, Parameter, Stage

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PARAMETER", "apply"]

_RANGE = Integer(-1, 2**31 - 1)


class _Count:
    """A count of tokens; 0 and, as in vLLM, -1 take all."""

    def check(self, name: str, value: object) -> int:
        """`value`, or 0 for -1."""
        return max(0, _RANGE.check(name, value))

    def schema(self) -> Mapping[str, Any]:
        """The bounds, -1 included."""
        return _RANGE.schema()


def apply(logits: Tensor, values: Tensor) -> Tensor:
    """Keep the `values` `[R, 1]` top tokens of each row of `[R, V]`, and any tied with the last one.

    Ties are kept so that the result does not depend on the order in which equal logits happen to be found.
    """
    counts = values.clamp(max=logits.shape[-1]).long()  # [R, 1], on the host: no wait for the device
    top = logits.topk(int(counts.amax()), dim=-1).values  # [R, max k], descending
    threshold = top.gather(-1, (counts - 1).to(logits.device))  # [R, 1]
    return logits.masked_fill(logits < threshold, float("-inf"))


PARAMETER = Parameter(
    name="top_k",
    kind=_Count(),
    default=0,
    neutral=0,
    nullable=False,
    home=Home.SPEC,
    field="top_k",
    doc="Draw only from this many of the most likely tokens (and any tied with the last one); 0 or -1 takes all.",
    stages=(Stage(20, apply),),
    random_only=True,
    from_model=True,
)
