"""Working memory for compiled kernels, which allocate nothing themselves. Decides how long it lives."""

from __future__ import annotations

import threading

import torch

__all__ = ["Scratch"]


class Scratch(threading.local):
    """Each thread's working memory for one call: its contents mean nothing before or after. Grows, never shrinks."""

    def __init__(self) -> None:
        self._size = 0
        self._address = 0
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address_of(self, count: int) -> int:
        """The address of at least `count` bytes, on a cache line."""
        if count > self._size:
            self._memory, self._size = torch.empty(count, dtype=torch.uint8), count
            self._address = self._memory.data_ptr()
        return self._address
