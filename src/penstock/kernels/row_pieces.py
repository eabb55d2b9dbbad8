"""CUDA products in pieces of a few sizes that give the same bits, so that no row's bits depend on the other rows.

A matrix library chooses a kernel, and with it the order of every sum, by the sizes of its operands. So rows are
multiplied in pieces of `STANDARD` rows, or of another of `SIZES` that gives the same bits; the last piece is padded
with arbitrary rows whose results are ignored. Which sizes give the same bits is tested once per shape of weight, on
random numbers: another order of summation changes nearly every element, so one product of a thousand rows is enough.
With small pieces, a step of few rows stays bound by reading its weights; large pieces read the weights less often.

Decides how rows are cut; a row's place within its piece does not change its sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SIZES", "STANDARD", "alike_sizes", "filled_up", "linear_in_pieces", "pieces", "empty_with_room"]

STANDARD = 256
"""The size that every other is compared with."""

SIZES = (64, 128, STANDARD, 1024)

_PERIOD = 1_000_003
"""How many random numbers are drawn, on the host; a weight repeats them, but no two of its rows are alike."""

_TRIED_BYTES = 1 << 27
"""Sizes above `STANDARD` are tried only if the result of a piece has no more bytes than this."""


def linear_in_pieces(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias + residual`, computed in pieces of rows.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, in the dtype of `x`.
        bias: `[N]` in the dtype of `x`, or None.
        out_dtype: dtype of the result; None for that of `x`. Without bias and residual, a float32 result is not
            rounded to the dtype of `x` first.
        residual: `[T, N]` in the dtype of `x`, or None. It may be overwritten: the result may reuse its memory.

    Returns:
        `[T, N]`, contiguous, made by `empty_with_room`.
    """
    adds = residual is not None and bias is None and residual.dtype == x.dtype == (out_dtype or x.dtype)
    made = x.dtype if bias is not None or residual is not None else out_dtype or x.dtype
    product = _Product(tuple(weight.shape), x.dtype, made, bias is not None, adds, x.device)
    cut = _cut(len(x), _sizes(product))
    filled = filled_up(x, sum(cut))
    if adds and residual is not None:
        out = filled_up(residual, sum(cut), to_write=True)
    else:
        out = empty_with_room(x, (sum(cut), len(weight)), made)
    for piece, result in zip(filled.split(cut), out.split(cut), strict=True):
        _multiply(piece, weight.t(), bias, result, adds)
    out = out[: len(x)]
    if residual is not None and not adds:
        out = residual + out
    return out if out_dtype is None else out.to(out_dtype)


def pieces(x: Tensor) -> Iterator[Tensor]:
    """Split `x` `[T, ...]`, T a multiple of `STANDARD`, into pieces of `STANDARD` rows."""
    return iter(x.split(STANDARD))


def empty_with_room(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Allocate `[T, ...]` on the device of `like`, uninitialised and contiguous.

    Memory up to a multiple of `STANDARD` rows follows it, so that what is written to it can be padded in place.
    """
    rows = -(-shape[0] // STANDARD) * STANDARD
    return like.new_empty((rows, *shape[1:]), dtype=dtype or like.dtype)[: shape[0]]


def filled_up(x: Tensor, rows: int | None = None, *, to_write: bool = False) -> Tensor:
    """`x` padded with arbitrary rows to `rows`, or to whole pieces; contiguous, so that all pieces have equal strides.

    A view if `x` is contiguous and has enough memory behind it, else a copy. With `to_write`, a view only if that
    memory was allocated for `x` alone, as by `empty_with_room`.
    """
    wanted = -(-len(x) // STANDARD) * STANDARD if rows is None else rows
    if x.is_contiguous():
        width = x.numel() // max(len(x), 1)
        there = x.untyped_storage().nbytes() // x.itemsize
        own = x.storage_offset() == 0 and there == -(-len(x) // STANDARD) * STANDARD * width
        if x.storage_offset() + wanted * width <= there and (own or not to_write):
            return x.as_strided((wanted, *x.shape[1:]), x.stride())
    filled = x.new_empty((wanted, *x.shape[1:]))
    filled[: len(x)] = x
    return filled


def _cut(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of the pieces for `rows` rows; the last piece may be padded. `sizes` ascend."""
    cut = []
    while rows > 0:
        enough = next((size for size in sizes if size >= rows and size <= STANDARD), None)
        cut.append(enough or max(size for size in sizes if size <= max(rows, STANDARD)))
        rows -= cut[-1]
    return cut


class _Product(NamedTuple):
    """Everything that a library chooses a kernel by, except the number of rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype
    biased: bool
    adds: bool
    device: torch.device


@lru_cache(maxsize=256)
def _sizes(product: _Product) -> tuple[int, ...]:
    outputs, inputs = product.shape
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(_PERIOD, generator=draw).to(product.device, product.dtype)

    def numbers(first: int, *shape: int) -> Tensor:
        count = math.prod(shape)
        row = drawn.repeat(-(-(first + count) // _PERIOD))[first : first + count]
        return row.clone().view(shape)  # a tensor of its own: libraries also choose kernels by address

    x, weight = numbers(0, max(SIZES), inputs), numbers(1, outputs, inputs)
    return alike_sizes(x, weight, numbers(2, outputs) if product.biased else None, product.out_dtype, adds=product.adds)


def alike_sizes(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, adds: bool = False
) -> tuple[int, ...]:
    """The sizes of pieces that give products of this shape the same bits as pieces of `STANDARD` rows.

    Args:
        x: `[max(SIZES), K]`, numbers to try.
        weight: `[N, K]`.
        bias: `[N]`, or None.
        out_dtype: dtype of the result.
        adds: whether products are added to the output's previous contents.

    Returns:
        The sizes, ascending; always with `STANDARD`.
    """
    outputs = len(weight)
    fits = [size for size in SIZES if size <= STANDARD or size * outputs * out_dtype.itemsize <= _TRIED_BYTES]
    x = x[: max(fits)]
    before = x[:, :1].to(out_dtype).expand(-1, outputs)

    def by(size: int) -> Tensor:
        out = before.clone(memory_format=torch.contiguous_format)
        for piece, result in zip(x.split(size), out.split(size), strict=True):
            _multiply(piece, weight.t(), bias, result, adds)
        return out

    standard = by(STANDARD)
    return tuple(size for size in fits if size == STANDARD or torch.equal(by(size), standard))


def _multiply(x: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor, adds: bool) -> None:
    """Write `x @ columns + bias` to `out`, or add `x @ columns` to it."""
    if adds:
        torch.addmm(out, x, columns, out=out)
    elif bias is not None:
        torch.addmm(bias, x, columns, out=out)
    elif out.dtype != x.dtype:
        torch.mm(x, columns, out_dtype=out.dtype, out=out)
    else:
        torch.mm(x, columns, out=out)
