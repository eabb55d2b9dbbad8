"""Linear on packed weights, and rows of them.

Decides how the product is computed; does not know what the weight belongs to. The compiled kernels compute each output
element over the inputs in one order, so a row's bits depend neither on the other rows nor on the number of threads.
Without them the same products come from torch, unpacked at every call: a reference, slow and without that promise.

What is computed, for every kind: sums in float32 (exact integers where weights and activations are integers), plus
bias, plus residual, rounded once. Activations meet float32 weights as they are, bfloat16 weights as bfloat16, and
groups as integers with one scale for each row and group of 32: of 8 bits, or of 16 where the group's largest magnitude
is far above the row's usual ones (native/quantized_rows.h). A row with an infinite or NaN activation gives NaN where
activations are quantised; no other row is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.packed_layout import GROUP
from penstock.kernels.packed_weight import ELEMENTS, SMALLEST, UNPACK, PackedKind, PackedWeight, unpack
from penstock.kernels.scratch import Scratch

OUTLIER = 8.0
"""A group has 16 bits where the square of its largest magnitude is above this many times the row's mean of them."""

__all__ = ["embedding_rows", "gates", "packed_gated_linear", "packed_linear", "packed_linear_reference"]


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias + residual`.

    Args:
        x: `[T, K]`, float32 or bfloat16; rows may be strided views of a wider matrix.
        weight: of K inputs.
        bias: `[N]`, float32 or bfloat16, contiguous; or None.
        residual: `[T, N]`, float32 or bfloat16, rows may be strided; or None.
        out_dtype: float32 or bfloat16; None is that of `x`.

    Returns:
        `[T, N]`, contiguous, owned by the caller.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    out_dtype = out_dtype or x.dtype
    _check_operands(x, weight, bias, residual, out_dtype)
    if native.module is None:
        return packed_linear_reference(x, weight, bias, residual, out_dtype)
    out = torch.empty(len(x), weight.outputs, dtype=out_dtype)
    _run(x, weight, bias, residual, out, gated=False)
    return out


def gates(weight: PackedWeight) -> bool:
    """Whether `packed_gated_linear` serves a weight of gates and ups."""
    return native.available() and weight.outputs % 32 == 0


def packed_gated_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of the two halves of `x @ weight.T + bias`, which are never rounded nor stored (SwiGLU).

    Args:
        x: as for `packed_linear`.
        weight: `[2 * F, K]`, the gate's F rows first; one that `gates`.
        bias: `[2 * F]`, as for `packed_linear`.

    Returns:
        `[T, F]` in the dtype of `x`, contiguous, owned by the caller.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    _check_operands(x, weight, bias, None, x.dtype)
    out = torch.empty(len(x), weight.outputs // 2, dtype=x.dtype)
    _run(x, weight, bias, None, out, gated=True)
    return out


def _run(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    """The compiled kernel, on operands that were checked."""
    rows = len(x)
    scratch_bytes = rows * weight.scratch_bytes
    native.module.linear(
        weight.kind,
        weight.outputs,
        weight.inputs,
        weight.data.data_ptr(),
        rows,
        x.data_ptr(),
        x.stride(0),
        ELEMENTS[x.dtype],
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else ELEMENTS[bias.dtype],
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        0 if residual is None else ELEMENTS[residual.dtype],
        out.data_ptr(),
        out.shape[1],
        ELEMENTS[out.dtype],
        gated,
        _scratch.address_of(scratch_bytes),
        scratch_bytes,
    )


_scratch = Scratch()


def _check_operands(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor | None, out_dtype: torch.dtype
) -> None:
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.dtype not in ELEMENTS or not _has_whole_rows(x):
        raise ValueError(f"x must be [T, {weight.inputs}], float32 or bfloat16; got {list(x.shape)} {x.dtype}")
    if out_dtype not in ELEMENTS:
        raise ValueError(f"out_dtype must be float32 or bfloat16; got {out_dtype}")
    if bias is not None and (bias.shape != (weight.outputs,) or bias.dtype not in ELEMENTS or not bias.is_contiguous()):
        raise ValueError(f"bias must be [{weight.outputs}], float32 or bfloat16; got {list(bias.shape)} {bias.dtype}")
    if residual is not None and (
        residual.shape != (x.shape[0], weight.outputs)
        or residual.dtype not in ELEMENTS
        or not _has_whole_rows(residual)
    ):
        raise ValueError(
            f"residual must be [{len(x)}, {weight.outputs}], float32 or bfloat16;"
            f" got {list(residual.shape)} {residual.dtype}"
        )


def _has_whole_rows(matrix: Tensor) -> bool:
    """Elements of a row follow each other, and rows do not overlap."""
    if matrix.is_contiguous():
        return True
    rows, width = matrix.shape
    between_rows, within_row = matrix.stride()
    return (within_row == 1 or width == 1) and (between_rows >= width or rows == 1)


def packed_linear_reference(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What `packed_linear` computes, in torch; equal up to the rounding of float32 sums."""
    out = _as_multiplied(x, weight.kind) @ unpack(weight).T
    if bias is not None:
        out = out + bias.float()
    if residual is not None:
        out = out + residual.float()
    return out.to(out_dtype or x.dtype)


def _as_multiplied(x: Tensor, kind: PackedKind) -> Tensor:
    """Activations as they meet weights of this kind: as they are, or rounded to bfloat16, or to codes and back."""
    if kind is PackedKind.F32:
        return x.float().contiguous()  # torch may add up strided rows in another order
    if kind is PackedKind.BF16:
        return x.bfloat16().float()
    inputs = x.shape[1]
    numbers = torch.nn.functional.pad(x.float(), (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))  # [T, groups, GROUP]
    largest = numbers.abs().amax(dim=2, keepdim=True)
    fine = largest.square() > OUTLIER * largest.square().mean(dim=1, keepdim=True)
    most = torch.where(fine, 32512.0, 127.0)
    zero = largest < SMALLEST
    scale = (largest / most).masked_fill(zero, 0.0).masked_fill(~torch.isfinite(largest), torch.nan)
    inverse = (most / largest).masked_fill(zero, 0.0)
    return ((numbers * inverse).round() * scale).flatten(1)[:, :inputs]


def embedding_rows(ids: Tensor, weight: PackedWeight, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a packed table as numbers, so that an embedding tied to the head is stored once.

    Args:
        ids: `[T]` int64, contiguous.
        weight: the table `[V, H]`.
        out_dtype: float32 or bfloat16.

    Returns:
        `[T, H]`, owned by the caller.

    Raises:
        ValueError: an id lies outside the table, or a shape or dtype does not fit.
    """
    if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(f"ids must be [T] int64, contiguous; got {list(ids.shape)} {ids.dtype}")
    if out_dtype not in ELEMENTS:
        raise ValueError(f"out_dtype must be float32 or bfloat16; got {out_dtype}")
    if native.module is None:
        return _embedding_rows_in_torch(ids, weight).to(out_dtype)
    out = torch.empty((len(ids), weight.inputs), dtype=out_dtype)
    native.module.lookup(
        weight.kind,
        weight.outputs,
        weight.inputs,
        weight.data.data_ptr(),
        len(ids),
        ids.data_ptr(),
        out.data_ptr(),
        weight.inputs,
        ELEMENTS[out_dtype],
    )
    return out


def _embedding_rows_in_torch(ids: Tensor, weight: PackedWeight) -> Tensor:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.outputs:
        raise ValueError("an id lies outside the table")
    panels = weight.data.view(-(-weight.outputs // 16), -1)[ids // 16]  # [T, bytes]: the panel of each id
    rows = UNPACK[weight.kind](panels.flatten(), 16 * len(ids), weight.inputs)  # [T * 16, H]
    return rows[torch.arange(len(ids)) * 16 + ids % 16]
