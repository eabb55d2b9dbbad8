"""The head: from hidden states to logits.

Decides where a head's weight comes from, what dtype it is best given, and that logits are float32. Knows no family.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.packed_linear import packed_linear
from penstock.kernels.packed_weight import PackedKind, PackedWeight
from penstock.nn.layers import Embedding, Linear
from penstock.nn.parameters import Parameters

__all__ = ["bind_head", "hidden_dtype", "logits"]


def bind_head(parameters: Parameters, table: Embedding, rows: int, width: int, *, tied: bool) -> Linear:
    """Take `lm_head.weight` `[rows, width]`; or, if `tied`, share the weight of the embedding `table`."""
    if not tied:
        return Linear.bind_head(parameters, "lm_head", rows, width)
    parameters.ignore("lm_head.weight")  # a stored copy: the config's word wins, as in transformers
    return Linear(table.weight)


def hidden_dtype(head: Linear) -> torch.dtype:
    """What the head is given: a quantised one rounds by itself, and one in float32 does not; rounding loses more."""
    weight = head.weight
    wide = isinstance(weight, PackedWeight) and weight.kind is not PackedKind.BF16
    return torch.float32 if wide else torch.bfloat16


def logits(head: Linear, hidden: Tensor) -> Tensor:
    """See `CausalLM.logits`: `[S, H]` to `[S, V]` float32."""
    if isinstance(head.weight, PackedWeight):  # never rounded: in bfloat16 near-equal logits would tie
        return packed_linear(hidden, head.weight, head.bias, out_dtype=torch.float32)
    return head(hidden).float()
