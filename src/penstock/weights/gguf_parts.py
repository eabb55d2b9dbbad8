"""Reading and writing the fields that GGUF's block formats have in common."""

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
        ValueError: a number is beyond float16's range.
    """
    halves = numbers.to(torch.float16)
    if not bool(torch.isfinite(halves).all()):
        raise ValueError("holds a block whose scale is beyond the range of float16")
    return halves.view(torch.uint8)


def word_at(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes `start` to `end` of each block as words of `dtype`, widened to int32: `[B, words]`."""
    return blocks[:, start:end].contiguous().view(dtype).int()


def planes(packed: Tensor, run: int, shifts: Sequence[int], mask: int) -> Tensor:
    """Unpack bytes that hold several codes each: for each run of bytes, all codes at the first shift, then the next.

    Args:
        packed: uint8 `[B, bytes]`.
        run: number of bytes whose codes at one shift are neighbours.
        shifts: bit positions of the codes in a byte, in output order.
        mask: mask of a code.

    Returns:
        uint8 `[B, bytes * len(shifts)]`.
    """
    width = 8 if run % 8 == 0 else 1  # shift eight bytes as one word if no run ends inside a word
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64 if width == 8 else torch.uint8)
    wanted = int.from_bytes(bytes([mask] * width), "little")  # clears bits shifted in from the neighbouring byte
    each = [((words >> shift) & wanted).view(torch.uint8).view(len(packed), -1, run) for shift in shifts]
    return torch.stack(each, 2).flatten(1)
