"""Normalisation of the last dimension, accumulated in float32 whatever the dtype.

Decides the arithmetic and its rounding points; does not know where in a model a norm is used. Every row is independent.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["layer_norm_reference", "rms_norm_reference", "unit_rows"]


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation: `x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich 2019, equation 4).

    The quotient is computed in float32 and rounded to the dtype of `x` before the product with `weight`: the rounding
    points of Llama's original code, with which bfloat16 models were trained. If `weight` has another dtype, only the
    product is rounded.

    Args:
        x: `[..., H]`.
        weight: `[H]`, in the dtype of `x` or float32.
        eps: keeps rows of zeros finite.

    Returns:
        `[..., H]` in the dtype of `x`.
    """
    unit = unit_rows(x.float(), eps)
    if weight.dtype != x.dtype:  # a float32 weight must not be rounded: one rounding, at the end
        return (unit * weight.float()).to(x.dtype)
    return unit.to(x.dtype) * weight


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps)` of float32 rows `[..., H]`.

    On CUDA this is torch's fused norm, which gives each row its own thread block. A plain CUDA `mean` divides the work
    among threads according to the number of rows, so that its order of summation depends on the batch.
    """
    if x.is_cuda:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None, eps)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation with the biased variance: `(x - mean) / sqrt(var + eps) * weight + bias` (Ba et al. 2016).

    Args:
        x: `[..., H]`.
        weight: `[H]`.
        bias: `[H]`, or None.
        eps: keeps constant rows finite.

    Returns:
        `[..., H]` in the dtype of `x`.
    """
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
