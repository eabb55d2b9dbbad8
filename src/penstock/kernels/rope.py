"""Rotary position embedding: rotates the two halves of each head, or of its first part, by angles of its position.

Decides how given angles are applied; does not know how they were derived (`nn.rope` does). Every row is independent.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate_reference"]


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[i], x[i + R/2])` of each head by the given angles (Su et al. 2021, section 3.4.2).

    Pairs are made of the two halves of the first R elements of a head (the layout of Hugging Face checkpoints), not of
    neighbours; elements from R on pass through. Computed in float32 and rounded once at the end.

    Args:
        x: `[T, heads, D]`; rows may be strided.
        cos: `[T, R/2]`, float32: the row of each token's position. R, at most D, is twice its width.
        sin: `[T, R/2]`, float32.

    Returns:
        `[T, heads, D]` in the dtype of `x`, contiguous.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, R/2]
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)  # [T, heads, .] each
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)  # [T, heads, D]
    return rotated.to(x.dtype)
