"""The passing name of what is being written, so that a name that people use never stands for half a model."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["passing_name"]


def passing_name(target: Path) -> Path:
    """Under which this process writes what will be `target`: beside it, so that renaming costs nothing."""
    return target.with_name(f".{target.name}.{os.getpid()}.partial")
