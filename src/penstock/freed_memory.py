"""Returns memory to the system that was freed but is still held by the C library."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["REST_SECONDS", "give_back"]

REST_SECONDS = 2.0
"""After this long without work, most likely no request is waiting."""


def give_back() -> None:
    """Return freed memory to the system. Call it when no request waits, because it walks all free memory.

    glibc holds free memory between live allocations, and in the arena of each thread that ever allocated: tens of MiB
    after loading a model, hundreds after a flood of requests (malloc_trim(3)). Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
