"""Products on CUDA of a fixed number of rows at a time, so that a row's bits do not depend on how many there are.

A library of matrix products chooses a kernel, and with it the order of every sum, by the sizes that it is given. Here
it is always given the same: rows are multiplied in pieces of `PIECE_ROWS`, and the last piece is filled up with rows
that mean nothing, whose results are not looked at. A step of few rows waits for its weights and takes no longer for it.

Decides how rows are cut; a row's place within its piece does not change its sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["PIECE_ROWS", "filled_up", "linear_in_pieces", "pieces"]

PIECE_ROWS = 64


def linear_in_pieces(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, always for `PIECE_ROWS` rows at a time.

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
    """`x` `[T, ...]`, T a multiple of `PIECE_ROWS`, in pieces of as many rows."""
    return iter(x.split(PIECE_ROWS))


def filled_up(x: Tensor) -> Tensor:
    """`x` and so many rows more, of any numbers, that it has whole pieces; contiguous, so that pieces lie alike."""
    rows = -(-len(x) // PIECE_ROWS) * PIECE_ROWS
    if rows == len(x) and x.is_contiguous():
        return x
    filled = x.new_empty((rows, *x.shape[1:]))
    filled[: len(x)] = x
    return filled
