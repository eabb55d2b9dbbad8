"""Decodes GGUF's block formats: raw bytes to block parts and to numbers, on the CPU.

The layouts are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_q4_0` and its
neighbours). Blocks of 32 numbers are here, blocks of 256 in `gguf_k_blocks` and, for grids, in `gguf_grid_blocks`.
Invariant: numbers equal those of the `gguf` package, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.kernels.block_parts import BlockParts
from penstock.weights.gguf_grid_blocks import GRID_BLOCKS
from penstock.weights.gguf_header import READABLE_TYPES, BlockType
from penstock.weights.gguf_k_blocks import IQ4_VALUES, K_BLOCKS
from penstock.weights.gguf_parts import half_at, planes

__all__ = ["FLOAT_TYPES", "block_bytes", "block_parts", "decode"]

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that torch supports natively; all others are block formats."""

_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of E2M1, doubled


def decode(raw: Tensor, kind: BlockType) -> Tensor:
    """Decode whole blocks to numbers.

    Args:
        raw: uint8 `[bytes]`, contiguous.
        kind: format of the bytes.

    Returns:
        `[elements]`, in the stored float type, or float32 for blocks; may share `raw`'s memory.
    """
    if kind.name in FLOAT_TYPES:
        return raw.view(FLOAT_TYPES[kind.name])
    return block_parts(raw.view(-1, kind.bytes), kind.name).numbers().view(-1)


def block_parts(blocks: Tensor, name: str) -> BlockParts:
    """Split blocks, uint8 `[B, bytes]`, of the named format into their parts."""
    return _BLOCKS[name](blocks)


def block_bytes(name: str) -> int:
    """Bytes per block of the named format."""
    return next(kind.bytes for kind in READABLE_TYPES.values() if kind.name == name)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack `[B, 16]` bytes to `[B, 32]`: the low nibbles of all bytes, then the high nibbles."""
    return planes(packed, 16, (0, 4), 15)


def _five_bits(high: Tensor, packed: Tensor) -> Tensor:
    """Nibbles of `packed`, each with a fifth bit from `high` `[B, 4]`."""
    return _nibbles(packed) | planes(high, 1, range(8), 1) << 4


def _q4_0(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-17: 4-bit numbers around 8."""
    return BlockParts(_nibbles(blocks[:, 2:]), half_at(blocks, 0), bias=8)


def _q4_1(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-3: minimum; 4-19: 4-bit numbers from 0."""
    return BlockParts(_nibbles(blocks[:, 4:]), half_at(blocks, 0), minimum=half_at(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-5: high bits; 6-21: low bits of 5-bit numbers around 16."""
    return BlockParts(_five_bits(blocks[:, 2:6], blocks[:, 6:]), half_at(blocks, 0), bias=16)


def _q5_1(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-3: minimum; 4-7: high bits; 8-23: low bits of 5-bit numbers from 0."""
    return BlockParts(_five_bits(blocks[:, 4:8], blocks[:, 8:]), half_at(blocks, 0), minimum=half_at(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-33: signed bytes, returned plus 128."""
    return BlockParts(blocks[:, 2:] ^ 128, half_at(blocks, 0), bias=128)


def _iq4_nl(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-17: indices into `IQ4_VALUES`."""
    return BlockParts(_nibbles(blocks[:, 2:]), half_at(blocks, 0), values=IQ4_VALUES)


def _mxfp4(blocks: Tensor) -> BlockParts:
    """Byte 0: scale in E8M0; 1-16: numbers in E2M1 (Open Compute Project, Microscaling Formats, version 1.0)."""
    return BlockParts(_nibbles(blocks[:, 1:]), blocks[:, :1], values=_MXFP4_VALUES)


_BLOCKS: Mapping[str, Callable[[Tensor], BlockParts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    **K_BLOCKS,
    **GRID_BLOCKS,
}
"""Decoders by format: uint8 `[B, bytes]` to the parts of B blocks."""
