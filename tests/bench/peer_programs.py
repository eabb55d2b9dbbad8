"""Stand-ins for the programs of other engines."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

__all__ = ["program"]


def program(path: Path, code: str) -> Path:
    """An executable Python script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport json, pathlib, sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
