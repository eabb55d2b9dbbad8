"""CUDA products of a fixed number of rows at a time, so that a row's bits do not depend on the number of rows.

A matrix library chooses a kernel, and with it the order of every sum, by the sizes of its operands. Here the number of
rows is constant: rows are multiplied in pieces of `PIECE_ROWS`, and the last piece is padded with arbitrary rows whose
results are ignored. This costs a step of few rows no time, because such a step is bound by reading its weights.

Decides how rows are cut; a row's place within its piece does not change its sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["PIECE_ROWS", "filled_up", "linear_in_pieces", "pieces"]

PIECE_ROWS = 64


def linear_in_pieces(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, computed `PIECE_ROWS` rows at a time.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, in the dtype of `x`.
        bias: `[N]` in the dtype of `x`, or None.

    Returns:
        `[T, N]`, contiguous.
    """
    rows, columns = len(x), weight.t()
    filled = filled_up(x)
    out = x.new_empty((len(filled), len(weight)))
    for piece, result in zip(pieces(filled), pieces(out), strict=True):
        if bias is None:
            torch.mm(piece, columns, out=result)
        else:
            torch.addmm(bias, piece, columns, out=result)
    return out[:rows]


def pieces(x: Tensor) -> Iterator[Tensor]:
    """Split `x` `[T, ...]`, T a multiple of `PIECE_ROWS`, into pieces of `PIECE_ROWS` rows."""
    return iter(x.split(PIECE_ROWS))


def filled_up(x: Tensor) -> Tensor:
    """Pad `x` with uninitialised rows to whole pieces; contiguous, so that all pieces have the same strides."""
    rows = -(-len(x) // PIECE_ROWS) * PIECE_ROWS
    if rows == len(x) and x.is_contiguous():
        return x
    filled = x.new_empty((rows, *x.shape[1:]))
    filled[: len(x)] = x
    return filled
