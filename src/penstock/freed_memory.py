"""Memory that was freed, and that the C library keeps: how it goes back to the system."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["REST_SECONDS", "give_back"]

REST_SECONDS = 2.0
"""After so long without work nobody waits, most likely."""


def give_back() -> None:
    """Return what was freed to the system; for moments in which nobody waits, for it walks all that is free.

    glibc keeps room between values that live on, and in the arena of each thread that ever allocated: tens of MiB after
    a model was loaded, hundreds after a flood of requests (malloc_trim(3)). Other C libraries cannot be asked.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
