"""Rotary position embedding: rotates the two halves of each head, or of its first part, by its position's angles.

Decides how given angles are applied; does not know how they were derived (`nn.rope` does). Every row is independent.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate_reference"]


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + R/2])` of each head by the given angles (Su et al. 2021, section 3.4.2).

    A pair takes one element from each half of the first R elements of a head (the layout of Hugging Face checkpoints),
    not two neighbours; elements from R on pass through. Computed in float32 and rounded once at the end.

    Args:
        x: `[T, heads, D]`; rows may be strided.
        cos: `[T, R/2]`, float32: one row per token, for its position. R is at most D.
        sin: `[T, R/2]`, float32.

    Returns:
        `[T, heads, D]` in the dtype of `x`, contiguous.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R/2]
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)  # [T, heads, .] each
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)  # [T, heads, D]
    return rotated.to(x.dtype)
