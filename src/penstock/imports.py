"""Imports many modules with the garbage collector disabled.

Torch and its dependencies create two hundred thousand objects that live as long as the process. Garbage collection
during the imports takes a sixth of the time until a server listens; scanning the objects later stalls every stream.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["lasting_imports"]


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Inside, no garbage is collected; objects that exist at the end never are. Only for Penstock's own processes."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
