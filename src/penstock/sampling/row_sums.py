"""Sums over the rows of a matrix, in an order that does not depend on how many rows there are.

On a CPU a cumulative sum has such an order; `sum` has none: it adds up a single row in a different order from a row
among several. On CUDA neither has. There probabilities are added as integers, which give the same sum in any order, and
other numbers are added by halves: the second half of each row to its first, until one number is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["row_sums", "running_sums"]

_UNITS = 2.0**52
"""Where probabilities are added as integers, their unit is 1 over this number."""


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
