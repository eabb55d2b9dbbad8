"""Sums over the rows of a matrix, in an order that does not depend on how many rows there are.

On a CPU a cumulative sum has one; `sum` has not: it adds up a single row in another order than one of several. On CUDA
neither has. There sums of probabilities are of integers, which have no order, and other sums are of halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["row_sums", "running_sums"]

_UNITS = 2.0**52
"""Probabilities are counted in units of 1 over this number where sums are of integers."""


def running_sums(probabilities: Tensor) -> Tensor:
    """Cumulative sums `[R, W]` float64 of rows that add up to 1, or parts of such rows."""
    if not probabilities.is_cuda:
        return probabilities.cumsum(-1)
    return (probabilities * _UNITS).long().cumsum(-1).double() / _UNITS


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row of `[R, W]` float64: `[R, 1]`."""
    if not x.is_cuda:
        return x.cumsum(-1)[:, -1:]
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest, x = x[:, half:], x[:, :half].clone()
        x[:, : rest.shape[-1]] += rest
    return x
