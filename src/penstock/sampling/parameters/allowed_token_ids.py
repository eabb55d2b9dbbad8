"""`allowed_token_ids`: only these tokens can be generated (vLLM's parameter of this name)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Integers
from penstock.sampling.parameter import Home, Parameter, RowStage

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.sampling.row_views import RowViews

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, rows: RowViews) -> Tensor:
    """`[R, V]` with -inf outside each row's list."""
    nobody: tuple[int, ...] = ()
    pairs = [(row, token) for row, spec in enumerate(rows.specs) for token in spec.get("allowed_token_ids", nobody)]
    at, ids = zip(*pairs, strict=True)
    where = (rows.ends.new_tensor(at).to(logits.device), rows.ends.new_tensor(ids).to(logits.device))
    return logits.new_full(logits.shape, float("-inf")).index_put(where, logits[where])


PARAMETER = Parameter(
    name="allowed_token_ids",
    kind=Integers(DEFAULT_LIMITS.max_allowed_token_ids, 0, 2**31 - 1),
    default=None,
    neutral=(),
    nullable=True,
    home=Home.SPEC,
    field="allowed_token_ids",
    doc="Generate only these token ids. Include the end-of-sequence id, or the completion cannot end with it. An empty"
    " list allows every token.",
    stages=(RowStage(1, apply),),
)
