"""The scripts in `examples/`: started as people start them, or run in this process, which has imported torch."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["run_here", "started"]

EXAMPLES = Path(__file__).parents[2] / "examples"


def started(name: str, *arguments: str) -> str:
    """What a script prints in a process of its own."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(name: str, *arguments: str) -> str:
    """What a script prints when it is run in this process."""
    script, said = EXAMPLES / f"{name}.py", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue()
