"""Blocks of integers with a zero point: what groups of GPTQ, AWQ and compressed-tensors become before packing.

Decides the byte layout of these blocks, which is internal: no file stores them. A number is `scale * (code - zero)`,
with the scale in float16. 4-bit integers have two block sizes: a longer group becomes several blocks, and longer blocks
have less overhead. 8-bit integers with a zero point of 128 become GGUF's Q8_0 blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.block_parts import BlockParts

__all__ = ["INTEGER_BLOCKS", "IntegerBlock", "integer_block", "integer_parts", "to_blocks"]

_HEADER = 3
_MIDDLE = 128


@dataclass(frozen=True, slots=True)
class IntegerBlock:
    """A kind of block: its inputs, bits per code, and size in bytes."""

    inputs: int
    bits: int
    bytes: int


INTEGER_BLOCKS: Mapping[str, IntegerBlock] = {
    "INT4": IntegerBlock(32, 4, 19),
    "INT4_128": IntegerBlock(128, 4, 67),
    "INT8": IntegerBlock(32, 8, 34),
}
"""Layout of 4-bit blocks: the scale, the zero point, then the codes, the first of two neighbours in the low nibble."""


def integer_block(bits: int, group: int, inputs: int, *, centred: bool) -> str:
    """The longest block kind that holds a matrix's codes without loss; "" for none.

    Args:
        bits: bits per code.
        group: inputs that share a scale and zero point.
        inputs: inputs of the matrix.
        centred: whether every zero point is half the code range.
    """
    kinds = [
        name
        for name, block in INTEGER_BLOCKS.items()
        if block.bits == bits and group % block.inputs == 0 and inputs % block.inputs == 0 and (bits == 4 or centred)
    ]
    return kinds[-1] if kinds else ""


def to_blocks(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Convert rows of a matrix to blocks.

    Args:
        kind: the kind of the blocks.
        codes: uint8 `[N, K]`.
        scales: float16 `[N, G]`.
        zeros: uint8 `[N, G]`.
        group: inputs per group, a whole number of blocks; the last group may be shorter.

    Returns:
        Uint8 `[N, K / inputs per block * bytes per block]`.
    """
    block = INTEGER_BLOCKS[kind]
    rows, count = len(codes), codes.shape[1] // block.inputs
    groups = torch.arange(count) * block.inputs // group  # of each block
    scale = scales[:, groups].contiguous().view(torch.uint8).view(rows, count, 2)
    if block.bits == 8:
        return torch.cat((scale, codes.view(rows, count, block.inputs) ^ _MIDDLE), dim=2).flatten(1)
    pairs = codes.view(rows, count, block.inputs // 2, 2)
    return torch.cat((scale, zeros[:, groups, None], pairs[..., 0] | pairs[..., 1] << 4), dim=2).flatten(1)


def integer_parts(blocks: Tensor) -> BlockParts:
    """Split 4-bit blocks, uint8 `[B, bytes]`, into their parts."""
    scale, packed = blocks[:, :2].contiguous().view(torch.float16), blocks[:, _HEADER:]
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    return BlockParts(codes, scale, zero=blocks[:, 2:_HEADER])
