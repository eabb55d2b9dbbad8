"""Allocates packed weights in large blocks of memory, for which the system is asked to use large pages.

Decides where each weight starts; does not know what it holds. Decoding a single sequence reads every weight once per
token at memory speed, which large pages make a fifth faster: hardware prefetching stops at page ends.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["LARGE_PAGE", "WeightMemory", "large_block", "whole_lines"]

_BLOCK = 64 << 20
LARGE_PAGE = 2 << 20
"""Bytes of a large page, on x86 and on most Arm."""

_ALIGNMENT = 64  # a cache line, and what torch aligns its own tensors to


def large_block(size: int) -> Tensor:
    """Zeroed memory of `size` bytes that starts on a large page; parts never written take no physical memory."""
    # Python's default is memory shared with child processes, which systems seldom back with large pages.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size + LARGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % LARGE_PAGE
    return block[start : start + size]


def whole_lines(count: int) -> int:
    """`count` bytes rounded up to whole cache lines."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class WeightMemory:
    """A bump allocator. Owned by the code that loads a model; a block lives as long as any weight in it.

    Args:
        block: uint8, the first block to use; or None. Further blocks come from `large_block`.
    """

    def __init__(self, block: Tensor | None = None) -> None:
        self._block = torch.empty(0, dtype=torch.uint8) if block is None else block
        self._used = 0

    def take(self, count: int) -> Tensor:
        """Allocate `count` bytes: uint8 `[count]`, contiguous, sharing no cache line with other allocations."""
        if self._used + count > len(self._block):
            self._block, self._used = large_block(max(_BLOCK, count)), 0
        start = self._used
        self._used = start + whole_lines(count)
        return self._block[start : start + count]
