"""The block formats of GGUF: raw bytes to numbers, on the CPU.

The layouts are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_q4_0`,
`block_q4_1`, `block_q8_0`). Invariant: each number is computed by the same float32 operations as in the `gguf` package,
so the results are equal bit for bit.
"""

from __future__ import annotations

import torch

from penstock.weights.gguf_header import BlockType

__all__ = ["FLOAT_TYPES", "decode"]

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that torch has itself; every other one comes in blocks."""


def decode(raw: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Numbers of whole blocks.

    Args:
        raw: uint8 `[bytes]`, contiguous.
        kind: how the bytes are to be understood.

    Returns:
        `[elements]`, in the stored float type, or float32 for blocks; may share `raw`'s memory.
    """
    if kind.name in FLOAT_TYPES:
        return raw.view(FLOAT_TYPES[kind.name])
    return _BLOCK_DECODERS[kind.name](raw.view(-1, kind.bytes)).view(-1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 `[B, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """`[B, 16]` bytes to `[B, 32]` float32: the low halves of all bytes come before the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Bytes 0-1: scale; 2-17: 4-bit numbers around 8."""
    return (_nibbles(blocks[:, 2:]) - 8.0) * _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Bytes 0-1: scale; 2-3: minimum; 4-19: 4-bit numbers from 0."""
    return _nibbles(blocks[:, 4:]) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Bytes 0-1: scale; 2-33: signed bytes."""
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


_BLOCK_DECODERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
"""From `[B, bytes]` to `[B, 32]` float32."""
