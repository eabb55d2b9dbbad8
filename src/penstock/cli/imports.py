"""Imports of many modules, without looking for garbage among what they create.

Torch and what comes with it are two hundred thousand objects that live as long as the process. A collector that goes
through them again and again while they are made takes a sixth of the time until a server listens; one that does later
holds up every stream while it does.
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
