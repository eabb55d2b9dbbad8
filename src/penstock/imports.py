"""Imports many modules with the garbage collector disabled.

Torch and its dependencies are two hundred thousand objects that live as long as the process. Garbage collection while
they are created takes a sixth of the time until a server listens; scanning them later stalls every stream.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["lasting_imports"]


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Inside, nothing is collected; objects that exist at the end never will be. Only for processes of our own."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
