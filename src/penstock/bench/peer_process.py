"""Running the programs of other engines: where an installed one lies, and a process from its start to its end.

Decides the environment that they all run in: offline, their output unbuffered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.contract.errors import EngineFault

__all__ = ["BIN", "EXE", "NotInstalledError", "executable", "program", "run"]

BIN, EXE = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")


class NotInstalledError(Exception):
    """A program is missing that installing the peer would bring; the message says what it is needed for, or nothing."""


def executable(folder: Path, engine: str) -> Path | None:
    """The program by which an installed engine is run, or None."""
    name = "llama-batched-bench" if engine == "llama.cpp" else "python"
    path = folder / engine / BIN / f"{name}{EXE}"
    return path if path.is_file() else None


def program(folder: Path, engine: str) -> Path:
    """The program by which an installed engine is run.

    Raises:
        NotInstalledError: it is missing.
    """
    path = executable(folder, engine)
    if path is None:
        raise NotInstalledError
    return path


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        EngineFault: it could not be started or failed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(  # noqa: S603 (programs of ours and of the peers that the operator installed)
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise EngineFault(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        tail = " | ".join(lines[-3:])
        raise EngineFault(f"{Path(command[0]).name} ended with status {done.returncode}: {tail[-600:]}")
    return done.stdout
