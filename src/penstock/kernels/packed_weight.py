"""Packs numbers, GGUF blocks and FP8 rows into the weights of `packed_linear`.

Decides how numbers are rounded; does not know what a weight belongs to or how products are computed. GGUF blocks keep
their numbers bit for bit. Packed bytes depend neither on what packs them (torch or compiled code) nor on the number of
threads: if a function is given a `cpu`, its threads share the work; otherwise the calling thread does it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import native, packed_layout
from penstock.kernels.native import Cpu
from penstock.kernels.packed_layout import GROUP
from penstock.kernels.packed_linear import ELEMENTS, PackedKind, PackedWeight, unpack
from penstock.kernels.weight_memory import WeightMemory

__all__ = [
    "MAX_INPUTS",
    "QUANTISED_AT_ONCE",
    "PackedKind",
    "PackedWeight",
    "block_kind",
    "memory_of",
    "pack_bf16",
    "pack_f32",
    "pack_fp8",
    "pack_q4_0",
    "pack_q4_1",
    "pack_q8_0",
    "quantize_int4",
    "quantize_int8",
    "room_for",
    "unpack",
]

QUANTISED_AT_ONCE = 32 << 20
"""Temporary memory for rounding to 8 or 4 bits, in bytes, besides the numbers and their blocks."""

_ROUNDING_BYTES = 20
"""Temporary bytes per number during rounding."""

MAX_INPUTS = 65536
"""An int8 sum over more inputs could overflow 32 bits."""


def room_for(kind: PackedKind, outputs: int, inputs: int, memory: WeightMemory | None) -> Tensor:
    """Allocate the packed bytes of a weight, uint8, from `memory`, or separately if it is None."""
    count = native.required().packed_bytes(kind, outputs, inputs)
    return torch.empty(count, dtype=torch.uint8) if memory is None else memory.take(count)


def memory_of(data: Tensor) -> Any:
    """The compiled `Memory` of a tensor of bytes."""
    return native.required().Memory(data.data_ptr(), len(data))


def _kept(data: Tensor, memory: WeightMemory | None) -> Tensor:
    """Copy bytes packed by torch into `memory`, if there is one."""
    return data if memory is None else memory.take(len(data)).copy_(data)


def _check_weight(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in ELEMENTS or not 1 <= weight.shape[1] <= MAX_INPUTS or not len(weight):
        raise ValueError(
            f"a weight must be [N, K] with K up to {MAX_INPUTS}, float32 or bfloat16;"
            f" got {list(weight.shape)} {weight.dtype}"
        )


def pack_bf16(weight: Tensor, memory: WeightMemory | None = None, cpu: Cpu | None = None) -> PackedWeight:
    """Pack numbers, rounded to bfloat16.

    Args:
        weight: `[N, K]`, float32 or bfloat16.
        memory: where to put the packed bytes, or None for memory of their own.
        cpu: provides the packing threads; None for the calling thread alone.

    Raises:
        ValueError: the shape or dtype does not fit.
    """
    _check_weight(weight)
    if native.module is None:
        data = packed_layout.pack_bf16(weight.bfloat16())
        return PackedWeight(PackedKind.BF16, *weight.shape, _kept(data, memory))
    return _pack_numbers(PackedKind.BF16, weight, memory, cpu)


def pack_f32(weight: Tensor, memory: WeightMemory | None = None, cpu: Cpu | None = None) -> PackedWeight:
    """Pack numbers as float32; see `pack_bf16`."""
    _check_weight(weight)
    if native.module is None:
        return PackedWeight(PackedKind.F32, *weight.shape, _kept(packed_layout.pack_f32(weight.float()), memory))
    return _pack_numbers(PackedKind.F32, weight, memory, cpu)


def _pack_numbers(kind: PackedKind, weight: Tensor, memory: WeightMemory | None, cpu: Cpu | None) -> PackedWeight:
    """Pack by a compiled function."""
    outputs, inputs = weight.shape
    weight = weight if weight.stride(1) == 1 and weight.stride(0) >= inputs else weight.contiguous()
    data = room_for(kind, outputs, inputs, memory)
    pack = getattr(cpu or native.open_cpu(), f"pack_{kind.name.lower()}")
    rows = native.required().Rows(weight.data_ptr(), weight.stride(0), ELEMENTS[weight.dtype])
    pack(outputs=outputs, inputs=inputs, weight=rows, to=memory_of(data))
    return PackedWeight(kind, outputs, inputs, data)


def quantize_int8(weight: Tensor, memory: WeightMemory | None = None, cpu: Cpu | None = None) -> PackedWeight:
    """Round to int8 with a scale for each group of 32 inputs, whose largest magnitude becomes 127: GGUF's Q8_0.

    Args:
        weight: `[N, K]`, float32 or bfloat16.
        memory: where to put the packed bytes, or None for memory of their own.
        cpu: provides the packing threads; None for the calling thread alone.

    Raises:
        ValueError: the shape or dtype does not fit, or a group has a number that is not finite, or a scale too large
            for float16.
    """
    _check_weight(weight)
    return _quantised("Q8_0", _int8_blocks, weight, memory, cpu)


def _int8_blocks(weight: Tensor) -> Tensor:
    """Quantise rows to Q8_0 blocks: `[N, K]` to uint8 `[N, G, 34]`."""
    numbers = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scales = (numbers.abs().amax(dim=2, keepdim=True) / 127.0).half()  # [N, G, 1]
    _check_finite(scales)
    steps = scales.float()
    codes = (numbers / steps.where(steps > 0, 1.0)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=2)


def quantize_int4(weight: Tensor, memory: WeightMemory | None = None, cpu: Cpu | None = None) -> PackedWeight:
    """Round to 4 bits between the smallest and the largest number of each group of 32 inputs, as GGUF's Q4_1 does.

    Args:
        weight: `[N, K]`, float32 or bfloat16.
        memory: where to put the packed bytes, or None for memory of their own.
        cpu: provides the packing threads; None for the calling thread alone.

    Raises:
        ValueError: the shape or dtype does not fit, or a group has a number that is not finite, or a scale or minimum
            too large for float16.
    """
    _check_weight(weight)
    return _quantised("Q4_1", _int4_blocks, weight, memory, cpu)


def _int4_blocks(weight: Tensor) -> Tensor:
    """Quantise rows to Q4_1 blocks: `[N, K]` to uint8 `[N, G, 20]`."""
    last = weight[:, -1:].expand(-1, -weight.shape[1] % GROUP)  # pad a short group with one of its own numbers
    numbers = torch.cat((weight, last), dim=1).float().unflatten(1, (-1, GROUP))  # [N, G, 32]
    low, high = numbers.aminmax(dim=2, keepdim=True)
    scales, minima = ((high - low) / 15.0).half(), low.half()  # [N, G, 1]
    _check_finite(scales)
    _check_finite(minima)
    steps = scales.float()
    codes = ((numbers - minima.float()) / steps.where(steps > 0, 1.0)).round().clamp(0, 15).to(torch.uint8)
    nibbles = codes[..., :16] | codes[..., 16:] << 4  # [N, G, 16]
    return torch.cat((scales.view(torch.uint8), minima.view(torch.uint8), nibbles), dim=2)


def _quantised(
    name: str,
    to_blocks: Callable[[Tensor], Tensor],
    weight: Tensor,
    memory: WeightMemory | None,
    cpu: Cpu | None,
) -> PackedWeight:
    """Round some rows at a time: for a whole weight, temporaries would take five times the memory of the numbers."""
    (outputs, inputs), form = weight.shape, _FORMATS[name]
    rows = max(1, QUANTISED_AT_ONCE // (_ROUNDING_BYTES * inputs))
    blocks = torch.empty(outputs, -(-inputs // GROUP), form.bytes, dtype=torch.uint8)
    for start in range(0, outputs, rows):
        blocks[start : start + rows] = to_blocks(weight[start : start + rows])
    return _pack_blocks(form, blocks.flatten(), outputs, inputs, memory, cpu)


def _check_finite(numbers: Tensor) -> None:
    if not torch.isfinite(numbers).all():
        raise ValueError("a weight to be quantised holds numbers that are not finite, or too large for its scales")


@dataclass(frozen=True, slots=True)
class _BlockFormat:
    """One of GGUF's block formats: 32 numbers in `bytes` bytes (ggml-common.h, `block_q4_0` etc.)."""

    name: str
    bytes: int
    kind: PackedKind


_FORMATS = {
    "Q4_0": _BlockFormat("Q4_0", 18, PackedKind.Q4),
    "Q4_1": _BlockFormat("Q4_1", 20, PackedKind.Q4),
    "Q8_0": _BlockFormat("Q8_0", 34, PackedKind.Q8),
}


_BLOCK_KINDS = {
    **{name: form.kind for name, form in _FORMATS.items()},
    **dict.fromkeys(("Q5_0", "Q5_1"), PackedKind.Q5),
    "Q2_K": PackedKind.Q2K,
    "Q3_K": PackedKind.Q3K,
    "Q4_K": PackedKind.Q4K,
    "Q5_K": PackedKind.Q5K,
    "Q6_K": PackedKind.Q6K,
    "IQ4_NL": PackedKind.NL4,
    "MXFP4": PackedKind.MX4,
    **dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S", "TQ1_0", "TQ2_0"), PackedKind.NL4K),
    **dict.fromkeys(("IQ2_XS", "IQ2_S", "IQ1_M"), PackedKind.NL4K16),
    "INT4": PackedKind.Z4,
    "INT4_128": PackedKind.Z4W,
    "INT8": PackedKind.Q8,
    "FP8": PackedKind.F8,
}


def block_kind(name: str) -> PackedKind:
    """The kind that blocks of this format are packed into: one of GGUF's formats, or of `weights.integer_blocks`."""
    return _BLOCK_KINDS[name]


def pack_q4_0(
    blocks: Tensor, outputs: int, inputs: int, memory: WeightMemory | None = None, cpu: Cpu | None = None
) -> PackedWeight:
    """Pack GGUF's Q4_0 blocks, code for code and scale for scale.

    Args:
        blocks: uint8, contiguous; each output's row is `inputs / 32` blocks of 18 bytes.
        outputs: number of rows.
        inputs: numbers in a row, a multiple of 32.
        memory: where to put the packed bytes, or None for memory of their own.
        cpu: provides the packing threads; None for the calling thread alone.

    Raises:
        ValueError: the blocks do not fill the shape, or a scale is not finite or not below 8192 in magnitude.
    """
    return _pack_blocks(_FORMATS["Q4_0"], blocks, outputs, inputs, memory, cpu)


def pack_q4_1(
    blocks: Tensor, outputs: int, inputs: int, memory: WeightMemory | None = None, cpu: Cpu | None = None
) -> PackedWeight:
    """Pack GGUF's Q4_1 blocks of 20 bytes; see `pack_q4_0`."""
    return _pack_blocks(_FORMATS["Q4_1"], blocks, outputs, inputs, memory, cpu)


def pack_q8_0(
    blocks: Tensor, outputs: int, inputs: int, memory: WeightMemory | None = None, cpu: Cpu | None = None
) -> PackedWeight:
    """Pack GGUF's Q8_0 blocks of 34 bytes; see `pack_q4_0`."""
    return _pack_blocks(_FORMATS["Q8_0"], blocks, outputs, inputs, memory, cpu)


def pack_fp8(
    rows: Tensor, outputs: int, inputs: int, memory: WeightMemory | None = None, cpu: Cpu | None = None
) -> PackedWeight:
    """Pack E4M3 numbers, code for code and scale for scale.

    Args:
        rows: uint8, contiguous; each output's row is a float32 scale for each 128 inputs (the last may cover fewer),
            then the codes, none of which may be NaN.
        outputs: number of rows.
        inputs: numbers in a row.
        memory: where to put the packed bytes, or None for memory of their own.
        cpu: provides the packing threads; None for the calling thread alone.

    Raises:
        ValueError: the rows do not fill the shape.
    """
    return _pack_rows("FP8", packed_layout.f8_row_bytes(inputs), rows, outputs, inputs, memory, cpu)


def _pack_blocks(
    form: _BlockFormat,
    blocks: Tensor,
    outputs: int,
    inputs: int,
    memory: WeightMemory | None,
    cpu: Cpu | None,
) -> PackedWeight:
    """Like `pack_q4_0`, for any of the formats; `inputs` may end within a block."""
    return _pack_rows(form.name, -(-inputs // GROUP) * form.bytes, blocks, outputs, inputs, memory, cpu)


def _pack_rows(
    name: str,
    row_bytes: int,
    stored: Tensor,
    outputs: int,
    inputs: int,
    memory: WeightMemory | None,
    cpu: Cpu | None,
) -> PackedWeight:
    if outputs < 1 or not 1 <= inputs <= MAX_INPUTS:
        raise ValueError(f"a weight must have outputs, and 1 to {MAX_INPUTS} inputs; got {outputs} x {inputs}")
    if stored.dtype != torch.uint8 or stored.numel() != outputs * row_bytes or not stored.is_contiguous():
        raise ValueError(
            f"{outputs} x {inputs} in {name} is {outputs * row_bytes} contiguous bytes;"
            f" got {stored.numel()} of {stored.dtype}"
        )
    kind = _BLOCK_KINDS[name]
    if native.module is None:
        data = _PACK_IN_TORCH[name](stored.view(outputs, row_bytes), inputs)
        return PackedWeight(kind, outputs, inputs, _kept(data, memory))
    data = room_for(kind, outputs, inputs, memory)
    pack = getattr(cpu or native.open_cpu(), f"pack_{name.lower()}")
    pack(outputs=outputs, inputs=inputs, blocks=memory_of(stored.view(-1)), to=memory_of(data))
    return PackedWeight(kind, outputs, inputs, data)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: `[N, G, bytes]` to `[N, G]`."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """The 32 codes of each block, low halves first: `[N, G, bytes]` to `[N, G * 32]`."""
    stored = blocks[:, :, at : at + 16]
    return torch.cat((stored & 15, stored >> 4), dim=2).flatten(1)


def _pack_q4_0_in_torch(rows: Tensor, _: int) -> Tensor:
    blocks = rows.unflatten(1, (-1, _FORMATS["Q4_0"].bytes))
    scales = _half(blocks, 0)
    minima = scales * -8.0
    if not torch.isfinite(minima).all():
        raise ValueError("the scale of a Q4_0 block is not a number below 8192")
    return packed_layout.pack_q4(_nibbles(blocks, 2), scales, minima)


def _pack_q4_1_in_torch(rows: Tensor, _: int) -> Tensor:
    blocks = rows.unflatten(1, (-1, _FORMATS["Q4_1"].bytes))
    return packed_layout.pack_q4(_nibbles(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _pack_q8_0_in_torch(rows: Tensor, _: int) -> Tensor:
    blocks = rows.unflatten(1, (-1, _FORMATS["Q8_0"].bytes))
    return packed_layout.pack_q8(blocks[:, :, 2:].flatten(1).view(torch.int8), _half(blocks, 0))


_PACK_IN_TORCH = {
    "Q4_0": _pack_q4_0_in_torch,
    "Q4_1": _pack_q4_1_in_torch,
    "Q8_0": _pack_q8_0_in_torch,
    "FP8": packed_layout.pack_f8,
}
"""By format: a function from rows `[N, bytes]` and the number of inputs to the packed bytes."""
