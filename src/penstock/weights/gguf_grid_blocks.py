"""GGUF's blocks of 256 numbers whose codes are points of a grid: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

A code selects a point: the magnitudes of 4 or 8 neighbours, from a list that the format fixes; signs are stored
separately. The lists are in `gguf_grids.bin`, because no shorter rule generates their points. The layouts are ggml's
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_iq2_xxs` and its neighbours).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.block_parts import BlockParts
from penstock.weights.gguf_parts import half_at, planes, word_at

__all__ = ["GRID_BLOCKS", "GRID_FILE", "GRID_POINTS"]

GRID_FILE = Path(__file__).with_name("gguf_grids.bin")
"""The points of all grids one after the other, in the order of `GRID_POINTS`: 16 bits each, little-endian.

A point has two bits per magnitude in grids of 8, and four bits in grids of 4, lowest bits first. They index the
magnitudes in ascending order.
"""

GRID_POINTS = {"IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ1_S": 2048, "IQ3_XXS": 256, "IQ3_S": 512}
"""Number of points of each grid."""

_SEVEN_BITS = (0, 7, 14, 21)
_THREE_BITS = (0, 3, 6, 9)

# Values of codes: bits 0 to 2 index a magnitude, bit 3 is its sign; in IQ1, bit 3 is the sign of the added eighth.
_OF_IQ2 = (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)
_OF_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_OF_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_OF_IQ1 = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0)


@cache
def _grid(name: str) -> Tensor:
    """The points of a grid as indices of magnitudes, uint8 `[points, 4 or 8]`."""
    before = 0
    for other, points in GRID_POINTS.items():
        if other == name:
            break
        before += points
    words = torch.frombuffer(bytearray(GRID_FILE.read_bytes()), dtype=torch.int16).int()
    width = 2 if not name.startswith("IQ3") else 4
    shifts = torch.arange(0, 16, width, dtype=torch.int32)
    return (words[before : before + GRID_POINTS[name], None] >> shifts & (1 << width) - 1).to(torch.uint8)


def _points(name: str, indices: Tensor) -> Tensor:
    """Look up the magnitude indices of points: int32 `[B, n]` to uint8 `[B, 256]`."""
    return _grid(name).index_select(0, indices.reshape(-1)).view(len(indices), -1)


def _fields(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Extract bit fields of int32 words: `[B, n]` to `[B, n * len(shifts)]`."""
    return (words[..., None] >> torch.tensor(shifts, dtype=torch.int32) & mask).flatten(1)


def _signs(bytes_: Tensor) -> Tensor:
    """The bits of uint8 `[B, 32]`, lowest first, moved to the sign bit of codes: `[B, 256]`."""
    return planes(bytes_, 1, range(8), 1) << 3


def _even_signs(seven: Tensor) -> Tensor:
    """Signs of 8 neighbours from seven bits, int32 `[B, 32]`; the eighth bit makes the parity even."""
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    return _signs((seven | parity << 7).to(torch.uint8))


def _odd(scales: Tensor) -> Tensor:
    """`2 s + 1` for integer scales `s`."""
    return (2 * scales + 1).to(torch.uint8)


def _iq2_xxs(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; then per 32 numbers: 4 bytes of points, and a word of four 7-bit sign fields and a scale."""
    words = word_at(blocks, 2, 66, torch.int32)  # [B, 16]
    indices = blocks[:, 2:].reshape(len(blocks), 8, 8)[..., :4].flatten(1)  # [B, 32]
    codes = _points("IQ2_XXS", indices.int()) | _even_signs(_fields(words[:, 1::2], _SEVEN_BITS, 127))
    return BlockParts(codes, half_at(blocks, 0), values=_OF_IQ2, sub_scales=_odd(words[:, 1::2] >> 28 & 15), unit=1 / 8)


def _iq2_xs(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-65: words of a 9-bit point and 7 signs; 66-73: 4-bit scales."""
    words = word_at(blocks, 2, 66, torch.int16)  # [B, 32]
    codes = _points("IQ2_XS", words & 511) | _even_signs(words >> 9 & 127)
    scales = _odd(planes(blocks[:, 66:74], 1, (0, 4), 15))
    return BlockParts(codes, half_at(blocks, 0), values=_OF_IQ2, sub_scales=scales, unit=1 / 8)


def _iq2_s(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-33: low bits of points; 34-65: signs; 66-73: high bits of points; 74-81: 4-bit scales."""
    indices = blocks[:, 2:34].int() | planes(blocks[:, 66:74], 1, (0, 2, 4, 6), 3).int() << 8
    codes = _points("IQ2_S", indices) | _signs(blocks[:, 34:66])
    scales = _odd(planes(blocks[:, 74:82], 1, (0, 4), 15))
    return BlockParts(codes, half_at(blocks, 0), values=_OF_IQ2, sub_scales=scales, unit=1 / 8)


def _iq3_xxs(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-65: points; 66-97: per 32 numbers a word of four 7-bit sign fields and a scale."""
    words = word_at(blocks, 66, 98, torch.int32)  # [B, 8]
    codes = _points("IQ3_XXS", blocks[:, 2:66].int()) | _even_signs(_fields(words, _SEVEN_BITS, 127))
    scales = _odd(words >> 28 & 15)
    return BlockParts(codes, half_at(blocks, 0), values=_OF_IQ3_XXS, sub_scales=scales, unit=1 / 4)


def _iq3_s(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-65: low bits, 66-73: high bits of points; 74-105: signs; 106-109: 4-bit scales."""
    indices = blocks[:, 2:66].int() | planes(blocks[:, 66:74], 1, range(8), 1).int() << 8
    codes = _points("IQ3_S", indices) | _signs(blocks[:, 74:106])
    scales = _odd(planes(blocks[:, 106:110], 1, (0, 4), 15))
    return BlockParts(codes, half_at(blocks, 0), values=_OF_IQ3_S, sub_scales=scales)


def _below(negative: Tensor, times: int) -> Tensor:
    """The sign bit of codes where the eighth is subtracted: int32 0 or 1 `[B, n]`, repeated for `times` neighbours."""
    return (negative.to(torch.uint8) << 3).repeat_interleave(times, dim=1)


def _iq1_s(blocks: Tensor) -> BlockParts:
    """Bytes 0-1: scale; 2-33: low bits of points; 34-49: per 32 numbers high bits of 4 points, a scale and a sign."""
    words = word_at(blocks, 34, 50, torch.int16)  # [B, 8]
    codes = _points("IQ1_S", blocks[:, 2:34].int() | _fields(words, _THREE_BITS, 7) << 8)
    codes = codes | _below(words >> 15 & 1, 32)
    return BlockParts(codes, half_at(blocks, 0), values=_OF_IQ1, sub_scales=_odd(words >> 12 & 7), unit=1 / 8)


def _iq1_m(blocks: Tensor) -> BlockParts:
    """Bytes 0-31: low bits of points; 32-47: their high bits and signs; 48-55: 3-bit scales, and the block's scale."""
    words = word_at(blocks, 48, 56, torch.int16)  # [B, 4], the high four bits of each are part of the block's scale
    nibbles = planes(blocks[:, 32:48], 1, (0, 4), 15).int()  # [B, 32]
    codes = _points("IQ1_S", blocks[:, :32].int() | (nibbles & 7) << 8) | _below(nibbles >> 3, 8)
    quarters = words >> 12 & 15
    whole = sum((quarters[:, at : at + 1] << 4 * at for at in range(1, 4)), quarters[:, :1])
    scale = whole.to(torch.int16).view(torch.float16)
    return BlockParts(codes, scale, values=_OF_IQ1, sub_scales=_odd(_fields(words, _THREE_BITS, 7)), unit=1 / 8)


GRID_BLOCKS: Mapping[str, Callable[[Tensor], BlockParts]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
"""Decoders by format: uint8 `[B, bytes]` to the parts of B blocks."""
