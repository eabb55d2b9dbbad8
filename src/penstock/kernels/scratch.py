"""Working memory for compiled kernels, which allocate none themselves. Decides how long it lives."""

from __future__ import annotations

import threading

import torch

__all__ = ["Scratch"]


class Scratch(threading.local):
    """Working memory, one per thread, whose contents are meaningful only during a call. Grows, never shrinks."""

    def __init__(self) -> None:
        self._size = 0
        self._address = 0
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address_of(self, count: int) -> int:
        """The address of at least `count` bytes, aligned to a cache line."""
        if count > self._size:
            self._memory, self._size = torch.empty(count, dtype=torch.uint8), count
            self._address = self._memory.data_ptr()
        return self._address
