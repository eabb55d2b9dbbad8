"""Linear projection, the bulk of the arithmetic: one signature for plain tensors and for packed weights.

Decides who computes: torch for a plain tensor (library matrix products choose their summation order by shape, so a
row's last bits may depend on how many rows there are), the packed kernels, which keep one order, for a packed one, and
oneDNN, called in shapes in which it keeps one, for a weight that it packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.onednn_linear import OneDnnWeight, onednn_linear
from penstock.kernels.packed_linear import packed_linear
from penstock.kernels.packed_weight import PackedWeight

__all__ = ["Weight", "linear"]

Weight = Tensor | PackedWeight | OneDnnWeight
"""`[N, K]`: numbers in the activations' dtype, or packed once in a form of its own."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias + residual`.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        bias: `[N]`.
        residual: `[T, N]`.

    Returns:
        `[T, N]` in the dtype of `x`.
    """
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight, bias, residual)
    if isinstance(weight, OneDnnWeight):
        return onednn_linear(x, weight, bias, residual)
    out = torch.nn.functional.linear(x, weight, bias)
    return out if residual is None else residual + out
