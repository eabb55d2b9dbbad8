"""The linear operation: rows times a weight matrix, plus a bias.

Decides how a product is computed; does not know what the weight belongs to. Plain torch: the library chooses its GEMM
by shape, so a row's bits may depend on how many rows share the call. It is the numerical reference for packed kernels
that accumulate over K in one fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, of the same dtype as `x`: one row per output.
        bias: `[N]`, or None.

    Returns:
        `[T, N]` in the dtype of `x`, owned by the caller.
    """
    return torch.nn.functional.linear(x, weight, bias)
