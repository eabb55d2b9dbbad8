"""Imports many modules with the garbage collector held off.

Torch and what comes with it are two hundred thousand objects that live as long as the process. Collecting among them
while they are made takes a sixth of the time until a server listens; collecting later holds up every stream.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["lasting_imports"]


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Inside, nothing is collected; what exists at the end never will be. Only for a process that is ours."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
