"""Quantises numbers to GGUF's block formats.

The inverse of `gguf_blocks`, with the same layouts. Blocks of 32 numbers match the reference implementation bit for
bit; for blocks of 256 with two levels of scales, `gguf_k_encode` searches for the smallest error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.weights.gguf_header import READABLE_TYPES, BlockType
from penstock.weights.gguf_k_encode import K_ENCODERS
from penstock.weights.gguf_parts import half_bytes

__all__ = ["ENCODABLE", "encode"]

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def encode(numbers: Tensor, kind: str) -> Tensor:
    """Encode numbers in a format.

    Args:
        numbers: finite float32, contiguous, a whole number of blocks.
        kind: a key of `ENCODABLE`.

    Returns:
        uint8 `[bytes]`, contiguous.

    Raises:
        ValueError: a number is not finite, or is beyond the range of the format's float16.
    """
    flat = numbers.reshape(-1)
    if not bool(torch.isfinite(flat).all()):
        raise ValueError("holds a number that is not finite")
    if kind in _FLOATS:
        stored = flat.to(_FLOATS[kind])
        if not bool(torch.isfinite(stored).all()):
            raise ValueError(f"holds a number beyond the range of {kind}")
        return stored.view(torch.uint8)
    return _ENCODERS[kind](flat.view(-1, ENCODABLE[kind].elements)).reshape(-1)


def _inverse(scales: Tensor) -> Tensor:
    """The reciprocal of each scale; 0 for a scale of 0 (a block of zeros)."""
    return torch.where(scales == 0, 0.0, 1.0 / scales)


def _largest(blocks: Tensor) -> Tensor:
    """The number of largest magnitude in each block, with its sign: `[B, 1]`."""
    return blocks.gather(1, blocks.abs().argmax(1, keepdim=True))


def _packed_nibbles(codes: Tensor) -> Tensor:
    """Pack codes `[B, 32]` into `[B, 16]` bytes, the first 16 codes in the low nibbles."""
    return codes[:, :16] | codes[:, 16:] << 4


def _packed_fifth_bits(codes: Tensor) -> Tensor:
    """The fifth bits of codes `[B, 32]`, as `[B, 4]` bytes."""
    bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(2, dtype=torch.uint8)


def _around_zero(blocks: Tensor, bias: int) -> tuple[Tensor, Tensor]:
    """Scales `[B, 1]` and codes: the number of largest magnitude gets code 0 (`-bias` scales). Rounds in float64."""
    scales = _largest(blocks) / -bias
    codes = (blocks.double() * _inverse(scales).double() + (bias + 0.5)).trunc_().clamp_(0, 2 * bias - 1)
    return scales, codes.to(torch.uint8)


def _between(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minima `[B, 1]`, and codes from 0 (the smallest number) to `top` (the largest)."""
    least = blocks.amin(1, keepdim=True)
    scales = (blocks.amax(1, keepdim=True) - least) / top
    codes = ((blocks - least) * _inverse(scales) + 0.5).trunc_().clamp_(0, top)
    return scales, least, codes.to(torch.uint8)


def _q4_0(blocks: Tensor) -> Tensor:
    scales, codes = _around_zero(blocks, 8)
    return torch.cat((half_bytes(scales), _packed_nibbles(codes)), dim=1)


def _q5_0(blocks: Tensor) -> Tensor:
    scales, codes = _around_zero(blocks, 16)
    return torch.cat((half_bytes(scales), _packed_fifth_bits(codes), _packed_nibbles(codes & 15)), dim=1)


def _q4_1(blocks: Tensor) -> Tensor:
    scales, least, codes = _between(blocks, 15)
    return torch.cat((half_bytes(scales), half_bytes(least), _packed_nibbles(codes)), dim=1)


def _q5_1(blocks: Tensor) -> Tensor:
    scales, least, codes = _between(blocks, 31)
    parts = half_bytes(scales), half_bytes(least), _packed_fifth_bits(codes), _packed_nibbles(codes & 15)
    return torch.cat(parts, dim=1)


def _q8_0(blocks: Tensor) -> Tensor:
    scales = blocks.abs().amax(1, keepdim=True) / 127
    raised = blocks * _inverse(scales)
    codes = (raised.abs() + 0.5).floor_().copysign_(raised)  # round half away from zero
    return torch.cat((half_bytes(scales), codes.to(torch.int8).view(torch.uint8)), dim=1)


_ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    **K_ENCODERS,
}
"""From float32 `[B, elements]` to uint8 `[B, bytes]`."""

ENCODABLE: Mapping[str, BlockType] = {
    kind.name: kind for kind in READABLE_TYPES.values() if kind.name in _ENCODERS or kind.name in _FLOATS
}
"""Formats that numbers can be encoded in, by name."""
