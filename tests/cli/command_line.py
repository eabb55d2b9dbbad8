"""Commands as people type them: in a process of their own, or in this one, which has imported torch."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys

import pytest

from penstock.cli import main

__all__ = ["only_line", "penstock", "started"]


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as people start it."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120", "PENSTOCK_ISA": ""},
    )


def penstock(*arguments: str, stdin: str = "", isa: str = "") -> subprocess.CompletedProcess[str]:
    """A command in this process: its exit code, and what it wrote."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for name in ("stdout", "stderr")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        patch.setenv("PENSTOCK_ISA", isa)
        patch.setattr(gc, "freeze", lambda: None)  # this process lives on after the command
        patch.setattr(sys, "argv", ["penstock", *arguments])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as end:
            main()
    out, err = (stream.buffer.getvalue().decode() for stream in streams.values())
    return subprocess.CompletedProcess(arguments, end.value.code, out, err)


def only_line(errors: str) -> str:
    """The only line written to standard error."""
    lines = [line for line in errors.splitlines() if line]
    assert len(lines) == 1, lines
    return lines[0]
