"""Weights that are packed once (float32, bfloat16, FP8 and quantised blocks): their products, and row lookup.

Decides how the product is computed; does not know what the weight belongs to, nor how it was made (`packed_weight`).
The compiled kernels sum each output element over the inputs in one fixed order, so a row's bits depend neither on the
other rows nor on the number of threads. Without a `cpu`, torch computes the same products from weights unpacked at
every call: a slow reference without that guarantee.

Every kind computes sums in float32 (exact integers where weights and activations are integers), plus bias, plus
residual, rounded once. Activations are left as they are for float32 weights, rounded to bfloat16 for bfloat16 and FP8
weights, and quantised to integers for the other kinds, with one scale per row and group of 32: to 8 bits, or to 16 if
the group's largest magnitude is far above the row's typical one (native/quantized_rows.h). Where activations are
quantised, a row with an infinite or NaN activation gives NaN, without affecting other rows. An FP8 scale is applied to
the sum of 128 products.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import native, packed_blocks, packed_layout
from penstock.kernels.native import Cpu
from penstock.kernels.native_rows import ACTIVATION_CODES, optional_rows
from penstock.kernels.packed_layout import GROUP
from penstock.kernels.scratch import Scratch

__all__ = [
    "ELEMENTS",
    "SMALLEST",
    "UNPACK",
    "PackedKind",
    "PackedWeight",
    "embedding_rows",
    "packed_gated_linear",
    "packed_linear",
    "packed_linear_reference",
    "unpack",
]

OUTLIER = 8.0
"""A group is quantised to 16 bits if its squared largest magnitude exceeds this many times the mean over the row."""

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""Codes of dtypes in the compiled kernels."""

SMALLEST = 2.0**-80
"""A group of activations whose largest magnitude is below this is quantised to zeros."""


class PackedKind(enum.IntEnum):
    """How weights are stored.

    BF16 takes 16 bits per weight, Q4 5 (4-bit codes, an fp16 scale and minimum per 32), Q8 8.5, F32 32. The block forms
    Q5 to NL4K16 hold the GGUF blocks that Q4 and Q8 do not, Z4 and Z4W hold 4-bit integers with zero points; see
    `packed_blocks`. F8 holds E4M3 numbers with a float32 scale per 128 inputs: 8.25 bits.
    """

    BF16 = 0
    Q4 = 1
    Q8 = 2
    F32 = 3
    Q5 = 4
    Q2K = 5
    Q3K = 6
    Q4K = 7
    Q5K = 8
    Q6K = 9
    NL4 = 10
    MX4 = 11
    NL4K = 12
    NL4K16 = 13
    Z4 = 14
    Z4W = 15
    F8 = 16

    @property
    def arithmetic(self) -> str:
        """The arithmetic of products: `int8` for all quantised weights except FP8."""
        return {PackedKind.F32: "fp32", PackedKind.BF16: "bf16", PackedKind.F8: "bf16"}.get(self, "int8")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[outputs, inputs]` as the kernels read it.

    Attributes:
        data: uint8 `[bytes]`, laid out as in `packed_layout` or `packed_blocks`.
        scratch_bytes: scratch that a compiled product needs per row.
        native: the weight as compiled functions take it; None without compiled kernels, or if `data` is a meta tensor.
    """

    kind: PackedKind
    outputs: int
    inputs: int
    data: Tensor
    scratch_bytes: int = field(init=False)
    native: Any = field(init=False)

    def __post_init__(self) -> None:
        """Set `native` and `scratch_bytes`."""
        module, address = native.module, self.data.data_ptr()
        known = (
            None
            if module is None or self.data.is_meta
            else module.Weight(self.kind, self.outputs, self.inputs, address)
        )
        object.__setattr__(self, "native", known)
        object.__setattr__(self, "scratch_bytes", 0 if module is None else module.scratch_bytes(self.kind, self.inputs))

    @property
    def nbytes(self) -> int:
        """Memory of the packed weight."""
        return self.data.nbytes

    @property
    def form(self) -> str:
        """The form's name, for display."""
        return self.kind.name.lower()

    @property
    def arithmetic(self) -> str:
        """The arithmetic of its products."""
        return self.kind.arithmetic

    @property
    def parts(self) -> tuple[PackedWeight]:
        """Itself."""
        return (self,)

    def matmul(
        self,
        cpu: Cpu | None,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `kernels.linear.Weight`: `packed_linear`."""
        return packed_linear(x, self, bias, residual, out_dtype, cpu=cpu)

    def rows(self, cpu: Cpu | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `kernels.linear.Weight`: `embedding_rows`."""
        return embedding_rows(ids, self, dtype, cpu=cpu)


UNPACK = {
    PackedKind.BF16: packed_layout.unpack_bf16,
    PackedKind.Q4: packed_layout.unpack_q4,
    PackedKind.Q8: packed_layout.unpack_q8,
    PackedKind.F32: packed_layout.unpack_f32,
    PackedKind.F8: packed_layout.unpack_f8,
    **{PackedKind[name]: partial(packed_blocks.unpack, form) for name, form in packed_blocks.BLOCK_FORMS.items()},
}


def unpack(weight: PackedWeight) -> Tensor:
    """The numbers that a packed weight stands for, float32 `[N, K]`."""
    return UNPACK[weight.kind](weight.data, weight.outputs, weight.inputs)


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    cpu: Cpu | None = None,
) -> Tensor:
    """`x @ weight.T + bias + residual`.

    Args:
        x: `[T, K]`, float32 or bfloat16; rows may be strided views of a wider matrix.
        weight: `[N, K]`.
        bias: `[N]`, float32 or bfloat16, contiguous; or None.
        residual: `[T, N]`, float32 or bfloat16, rows may be strided; or None.
        out_dtype: float32 or bfloat16; None for the dtype of `x`.
        cpu: runs the kernel; None for torch.

    Returns:
        `[T, N]`, contiguous, owned by the caller.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    out_dtype = out_dtype or x.dtype
    _check_operands(x, weight, bias, residual, out_dtype)
    if cpu is None:
        return packed_linear_reference(x, weight, bias, residual, out_dtype)
    out = torch.empty(x.shape[0], weight.outputs, dtype=out_dtype)
    _run(cpu, x, weight, bias, residual, out, gate=None)
    return out


def packed_gated_linear(
    cpu: Cpu, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, activation: str = "silu_and_mul"
) -> Tensor:
    """Apply a gated activation to the halves of `x @ weight.T + bias`, which are neither rounded nor stored.

    Args:
        cpu: runs the kernel.
        x: as for `packed_linear`.
        weight: `[2 * F, K]`, the gate's F rows first; F a multiple of 16.
        bias: `[2 * F]`, as for `packed_linear`.
        activation: a gated one (`..._and_mul`) of `kernels.activation`.

    Returns:
        `[T, F]` in the dtype of `x`, contiguous, owned by the caller.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check_operands(x, weight, bias, None, x.dtype)
    out = torch.empty(len(x), weight.outputs // 2, dtype=x.dtype)
    _run(cpu, x, weight, bias, None, out, gate=ACTIVATION_CODES[activation])
    return out


def _run(
    cpu: Cpu,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gate: int | None,
) -> None:
    """Run the compiled kernel on operands that have been checked."""
    module, rows = native.required(), x.shape[0]
    scratch_bytes = rows * weight.scratch_bytes
    cpu.linear(
        rows=rows,
        weight=weight.native,
        x=module.Rows(x.data_ptr(), x.stride(0), ELEMENTS[x.dtype]),
        bias=None if bias is None else module.Vector(bias.data_ptr(), ELEMENTS[bias.dtype]),
        residual=optional_rows("residual", residual),
        out=module.Rows(out.data_ptr(), out.shape[1], ELEMENTS[out.dtype]),
        gate=gate,
        scratch=module.Memory(_scratch.address_of(scratch_bytes), scratch_bytes),
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
    """Whether each row is contiguous and rows do not overlap."""
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
    """`packed_linear` in torch; equal to the compiled one up to the rounding of float32 sums."""
    out = _as_multiplied(x, weight.kind) @ unpack(weight).T
    if bias is not None:
        out = out + bias.float()
    if residual is not None:
        out = out + residual.float()
    return out.to(out_dtype or x.dtype)


def _as_multiplied(x: Tensor, kind: PackedKind) -> Tensor:
    """Activations as multiplied by weights of this kind: unchanged, rounded to bfloat16, or quantised and back."""
    if kind is PackedKind.F32:
        return x.float().contiguous()  # torch may sum strided rows in another order
    if kind in (PackedKind.BF16, PackedKind.F8):
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


def embedding_rows(
    ids: Tensor, weight: PackedWeight, out_dtype: torch.dtype = torch.float32, *, cpu: Cpu | None = None
) -> Tensor:
    """Look up rows of a packed table, so that an embedding tied to the head is stored only once.

    Args:
        ids: `[T]` int64, contiguous.
        weight: the table `[V, H]`.
        out_dtype: float32 or bfloat16.
        cpu: runs the lookup; None for torch.

    Returns:
        `[T, H]`, owned by the caller.

    Raises:
        ValueError: an id lies outside the table, or a shape or dtype does not fit.
    """
    if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(f"ids must be [T] int64, contiguous; got {list(ids.shape)} {ids.dtype}")
    if out_dtype not in ELEMENTS:
        raise ValueError(f"out_dtype must be float32 or bfloat16; got {out_dtype}")
    if cpu is None:
        return _embedding_rows_in_torch(ids, weight).to(out_dtype)
    count = ids.shape[0]
    out = torch.empty((count, weight.inputs), dtype=out_dtype)
    to = native.required().Rows(out.data_ptr(), weight.inputs, ELEMENTS[out_dtype])
    cpu.lookup(weight=weight.native, count=count, ids=ids.data_ptr(), out=to)
    return out


def _embedding_rows_in_torch(ids: Tensor, weight: PackedWeight) -> Tensor:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.outputs:
        raise ValueError("an id lies outside the table")
    panels = weight.data.view(-(-weight.outputs // 16), -1)[ids // 16]  # [T, bytes]: the panel of each id
    rows = UNPACK[weight.kind](panels.flatten(), 16 * len(ids), weight.inputs)  # [T * 16, H]
    return rows[torch.arange(len(ids)) * 16 + ids % 16]
