"""Allocates the memory of blocks that will be used soon, before a step writes there.

The system finds and zeroes a large page when it is first written, and all caches of a model reach the end of a page at
about the same block: once in some thousand tokens a step of 100 ms took 300 ms. Here a thread asks for the next page of
one cache after the other, with pauses. If steps overtake it, or the system has no call for this (Linux before 5.14,
other systems), the step allocates the memory itself.

Decides how far ahead memory is allocated. Memory far from any used block is not allocated.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

from penstock.kernels.weight_memory import LARGE_PAGE

__all__ = ["MemoryAhead"]

_POPULATE_WRITE = 23  # madvise(2): as if every page were written, but nothing changes
_REST_SECONDS = 0.01
"""Pause after each page, which takes 1 to 10 ms, so that steps lose little time."""


class MemoryAhead:
    """Allocates memory for the blocks after the highest one in use. Only one thread may call `reach` and `settle`.

    Args:
        caches: each `[num_blocks, ...]`, contiguous.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        self._able = sys.platform == "linux" and bool(caches) and all(cache.device.type == "cpu" for cache in caches)
        self._caches = tuple(caches)
        self._found = [0] * len(self._caches)  # bytes requested so far, by cache
        self._highest = -1
        self._enough_for = 0  # blocks
        self._working = False
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()

    def reach(self, blocks: Iterable[int]) -> None:
        """Note that these blocks are used from now on, and allocate ahead if needed."""
        highest = max(blocks, default=-1)
        if highest < self._enough_for or not self._able:
            return
        self._highest = max(self._highest, highest)
        if not self._working:
            self._working = True
            self._thread = threading.Thread(target=self._work, name="penstock-memory", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Allocate the memory for the blocks so far without pauses, and wait for it. Call before serving requests."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._hurry.clear()

    def _work(self) -> None:
        for index, cache in enumerate(self._caches):
            while self._able and self._found[index] < self._wanted(cache):
                self._ask(index, cache)
                self._hurry.wait(_REST_SECONDS)
        self._enough_for = min(map(self._blocks_found, self._found, self._caches))
        self._working = False

    def _blocks_found(self, found: int, cache: Tensor) -> int:
        """How many blocks can be in use before more memory of a cache is needed."""
        return len(cache) if found >= cache.nbytes else (found - LARGE_PAGE) // (cache.nbytes // len(cache))

    def _wanted(self, cache: Tensor) -> int:
        """How many bytes of a cache should be allocated: those of blocks in use, and one more page."""
        return min(cache.nbytes, cache.nbytes // len(cache) * (self._highest + 1) + LARGE_PAGE)

    def _ask(self, index: int, cache: Tensor) -> None:
        """Ask for the next large page of a cache."""
        begin = cache.data_ptr()
        start = (begin + self._found[index]) // LARGE_PAGE * LARGE_PAGE
        first, end = max(start, begin // mmap.PAGESIZE * mmap.PAGESIZE), min(start + LARGE_PAGE, begin + cache.nbytes)
        self._found[index] = end - begin
        self._able = _populate(first, end - first)  # no such call, or no memory left: steps find out


def _populate(address: int, count: int) -> bool:
    """Have Linux allocate `count` bytes from `address`, the start of a page. Returns whether it did."""
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), _POPULATE_WRITE)
