"""GGUF's blocks of 256 numbers with two levels of scales (Q2_K to Q6_K, IQ4_XS), and the ternary TQ1_0 and TQ2_0.

The layouts are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_q2_K` and its
neighbours). The scale of each share of 16 or 32 numbers is a short integer in units of the block's float16 scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.kernels.block_parts import BlockParts
from penstock.weights.gguf_parts import half_at, planes

__all__ = ["IQ4_VALUES", "K_BLOCKS"]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The non-uniform code values of IQ4_NL and IQ4_XS."""

_TWO_BITS = (0, 2, 4, 6)


def _signed(codes: Tensor, bias: int) -> Tensor:
    """Uint8 codes minus `bias`, as int8."""
    return (codes.to(torch.int16) - bias).to(torch.int8)


def _q2_k(blocks: Tensor) -> BlockParts:
    """Bytes 0-15: scales and, in the high nibbles, minima; 16-79: 2-bit numbers; 80-81: scale; 82-83: minimum."""
    shares = blocks[:, :16]
    return BlockParts(
        planes(blocks[:, 16:80], 32, _TWO_BITS, 3),
        half_at(blocks, 80),
        sub_scales=shares & 15,
        minimum=half_at(blocks, 82),
        sub_minima=shares >> 4,
    )


def _q3_k(blocks: Tensor) -> BlockParts:
    """Bytes 0-31: high bits; 32-95: low bits of 3-bit numbers around 4; 96-107: 6-bit scales around 32; 108-109: scale.

    The first 8 bytes of the scales hold the low nibbles of scales 0 to 7 and, in their high nibbles, those of 8 to 15;
    the last 4 bytes hold the high two bits of scales 0 to 3, 4 to 7 and so on.
    """
    low, high = planes(blocks[:, 32:96], 32, _TWO_BITS, 3), planes(blocks[:, :32], 32, range(8), 1)
    scales = planes(blocks[:, 96:104], 8, (0, 4), 15) | planes(blocks[:, 104:108], 4, _TWO_BITS, 3) << 4
    return BlockParts(low | high << 2, half_at(blocks, 108), bias=4, sub_scales=_signed(scales, 32))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack `[B, 12]` bytes into 8 scales and 8 minima of 6 bits.

    The low six bits of bytes 0-3 are scales 0 to 3, and those of bytes 4-7 are minima 0 to 3. The high two bits of
    these bytes are the high bits of scales and minima 4 to 7, whose low four bits are the nibbles of bytes 8-11.
    """
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        torch.cat((scales & 63, rest & 15 | scales >> 6 << 4), dim=1),
        torch.cat((minima & 63, rest >> 4 | minima >> 6 << 4), dim=1),
    )


def _q4_k(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-3: minimum; 4-15: 6-bit scales and minima; 16-143: 4-bit numbers."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = planes(blocks[:, 16:], 32, (0, 4), 15)
    return BlockParts(codes, half_at(blocks, 0), sub_scales=scales, minimum=half_at(blocks, 2), sub_minima=minima)


def _q5_k(blocks: Tensor) -> BlockParts:
    """Like Q4_K, except for bytes 16-47: high bits; 48-175: low bits of 5-bit numbers."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = planes(blocks[:, 48:], 32, (0, 4), 15) | planes(blocks[:, 16:48], 32, range(8), 1) << 4
    return BlockParts(codes, half_at(blocks, 0), sub_scales=scales, minimum=half_at(blocks, 2), sub_minima=minima)


def _q6_k(blocks: Tensor) -> BlockParts:
    """Bytes 0-127: low bits, 128-191: high bits of 6-bit numbers around 32; 192-207: signed scales; 208-209: scale."""
    codes = planes(blocks[:, :128], 64, (0, 4), 15) | planes(blocks[:, 128:192], 32, _TWO_BITS, 3) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return BlockParts(codes, half_at(blocks, 208), bias=32, sub_scales=scales)


def _iq4_xs(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-3: high bits, 4-7: low bits of 6-bit scales around 32; 8-135: indices into `IQ4_VALUES`."""
    scales = planes(blocks[:, 4:8], 1, (0, 4), 15) | planes(blocks[:, 2:4], 1, _TWO_BITS, 3) << 4
    return BlockParts(
        planes(blocks[:, 8:], 16, (0, 4), 15),
        half_at(blocks, 0),
        values=IQ4_VALUES,
        sub_scales=_signed(scales, 32),
    )


def _tq1_0(blocks: Tensor) -> BlockParts:
    """Bytes 0-47: five ternary digits per byte, 48-51: four, of numbers around 1; 52-53: scale.

    A byte divided by 256 is a fraction whose ternary digits are the numbers: the integer part of three times the
    fraction is its first digit.
    """
    digits = [
        (part[:, None] * torch.tensor(powers, dtype=torch.uint8).view(1, -1, 1)).flatten(1)  # modulo 256
        for part, powers in (
            (blocks[:, :32], (1, 3, 9, 27, 81)),
            (blocks[:, 32:48], (1, 3, 9, 27, 81)),
            (blocks[:, 48:52], (1, 3, 9, 27)),
        )
    ]
    codes = (torch.cat(digits, dim=1).to(torch.int16) * 3 >> 8).to(torch.uint8)
    return BlockParts(codes, half_at(blocks, 52), bias=1)


def _tq2_0(blocks: Tensor) -> BlockParts:
    """Bytes 0-63: 2-bit numbers around 1; 64-65: scale."""
    return BlockParts(planes(blocks[:, :64], 32, _TWO_BITS, 3), half_at(blocks, 64), bias=1)


K_BLOCKS: Mapping[str, Callable[[Tensor], BlockParts]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
"""Decoders by format: uint8 `[B, bytes]` to the parts of B blocks."""
