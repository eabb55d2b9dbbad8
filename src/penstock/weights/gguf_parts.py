"""Fields of GGUF's blocks: what the block formats have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["half_at", "half_bytes", "planes", "word_at"]


def half_at(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: uint8 `[B, bytes]` to float16 `[B, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def half_bytes(numbers: Tensor) -> Tensor:
    """Numbers `[B, 1]` as the bytes of float16: uint8 `[B, 2]`.

    Raises:
        ValueError: one is beyond float16's range.
    """
    halves = numbers.to(torch.float16)
    if not bool(torch.isfinite(halves).all()):
        raise ValueError("holds a block whose scale is beyond the range of float16")
    return halves.view(torch.uint8)


def word_at(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes `start` to `end` of each block as words of `dtype`, widened to int32: `[B, words]`."""
    return blocks[:, start:end].contiguous().view(dtype).int()


def planes(packed: Tensor, run: int, shifts: Sequence[int], mask: int) -> Tensor:
    """Short codes out of the bytes that hold several: for each run of bytes the codes at each shift, one after another.

    Args:
        packed: uint8 `[B, bytes]`.
        run: bytes whose codes at one shift are neighbours.
        shifts: where codes begin in a byte, in the order of what they hold.
        mask: of a code.

    Returns:
        uint8 `[B, bytes * len(shifts)]`.
    """
    width = 8 if run % 8 == 0 else 1  # eight bytes are shifted as one word where no run ends inside one
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64 if width == 8 else torch.uint8)
    wanted = int.from_bytes(bytes([mask] * width), "little")  # no bit of the byte beside it is left
    each = [((words >> shift) & wanted).view(torch.uint8).view(len(packed), -1, run) for shift in shifts]
    return torch.stack(each, 2).flatten(1)
