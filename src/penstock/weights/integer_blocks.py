"""Blocks of integers about a zero point: what groups of GPTQ, AWQ and compressed-tensors become before packing.

Decides how such blocks lie in bytes, which is between this file and itself: no file holds them. A number is
`scale * (code - zero)`, with the scale in float16. Two sizes of blocks hold integers of 4 bits: a group of any length
is as many blocks, and the longer ones have less to say besides their codes. Integers of 8 bits about 128 are blocks of
GGUF's Q8_0.
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
    """One of the kinds: so many inputs in a block, of so many bits, in so many bytes."""

    inputs: int
    bits: int
    bytes: int


INTEGER_BLOCKS: Mapping[str, IntegerBlock] = {
    "INT4": IntegerBlock(32, 4, 19),
    "INT4_128": IntegerBlock(128, 4, 67),
    "INT8": IntegerBlock(32, 8, 34),
}
"""Of 4 bits: the scale, the code that stands for zero, and codes, the first of two neighbours in the low half."""


def integer_block(bits: int, group: int, inputs: int, *, centred: bool) -> str:
    """The kind that holds a matrix without loss, the longest there is; "" for none.

    Args:
        bits: of a code.
        group: inputs with a scale and zero point in common.
        inputs: of the matrix.
        centred: every zero point is half of the codes.
    """
    kinds = [
        name
        for name, block in INTEGER_BLOCKS.items()
        if block.bits == bits and group % block.inputs == 0 and inputs % block.inputs == 0 and (bits == 4 or centred)
    ]
    return kinds[-1] if kinds else ""


def to_blocks(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Rows of a matrix as blocks.

    Args:
        kind: of the blocks.
        codes: uint8 `[N, K]`.
        scales: float16 `[N, G]`.
        zeros: uint8 `[N, G]`.
        group: inputs of a group, whole blocks; the last one may be shorter.

    Returns:
        Uint8 `[N, K / inputs of a block * bytes of a block]`.
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
    """The parts of blocks of 4 bits, uint8 `[B, bytes]`."""
    scale, packed = blocks[:, :2].contiguous().view(torch.float16), blocks[:, _HEADER:]
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    return BlockParts(codes, scale, zero=blocks[:, 2:_HEADER])
