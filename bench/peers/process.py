"""Finds and runs the programs of other engines, all with the same environment variables: offline, output unbuffered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.contract.errors import EngineFault

__all__ = [
    "BIN",
    "EXE",
    "FROM_FOLDER",
    "PROGRAMS",
    "NotInstalledError",
    "is_installed",
    "program",
    "record_source",
    "recorded_source",
    "run",
    "version_of",
]

BIN, EXE = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")
BENCH = "llama-batched-bench"
PROGRAMS = {
    "llama.cpp": ("llama-quantize", "llama-imatrix", "llama-perplexity", "llama-server", BENCH),
    "ik_llama.cpp": (BENCH,),
}
"""Programs of the engines that are built from source; the others need an interpreter only."""
FROM_FOLDER = ("ik_llama.cpp",)
"""Engines that are in no package index: the caller names a folder with their source."""


class NotInstalledError(Exception):
    """A program is missing that `--install` would bring; the message says what it is needed for, or is empty."""


def is_installed(folder: Path, engine: str) -> bool:
    """Whether all programs of an engine are there; an earlier version of Penstock may have installed fewer."""
    return all(_path(folder, engine, name).is_file() for name in PROGRAMS.get(engine, ("python",)))


def program(folder: Path, engine: str, name: str = "", needed_for: str = "") -> Path:
    """Find a program of an engine, by default the one that measures it.

    Args:
        folder: the directory of peers.
        engine: a key of `PROGRAMS` or of `install.INSTALLABLE`.
        name: the program's name.
        needed_for: what the error says it is needed for; "" for the program that runs the peer itself.

    Raises:
        NotInstalledError: the program is missing.
    """
    name = name or (BENCH if engine in PROGRAMS else "python")
    path = _path(folder, engine, name)
    if not path.is_file():
        raise NotInstalledError(needed_for and f"needs {name} {needed_for}; ")
    return path


def record_source(folder: Path, engine: str, digest: str) -> None:
    """Note which source an installed engine was built from."""
    _source_record(folder, engine).write_text(f"{digest}\n", encoding="utf-8")


def recorded_source(folder: Path, engine: str) -> str:
    """Return the digest of the source that an engine was built from; "" if there is no record of it."""
    record = _source_record(folder, engine)
    return record.read_text(encoding="utf-8").strip() if record.is_file() else ""


def _source_record(folder: Path, engine: str) -> Path:
    return folder / engine / "source"


def _path(folder: Path, engine: str, name: str) -> Path:
    return folder / engine / BIN / f"{name}{EXE}"


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        EngineFault: the program could not be started, or failed.
    """
    done = _finished(command, folder)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        tail = " | ".join(lines[-3:])
        raise EngineFault(f"{Path(command[0]).name} ended with status {done.returncode}: {tail[-600:]}")
    return done.stdout


def version_of(path: Path) -> str:
    """Return what a program of llama.cpp answers to `--version`, on stdout or stderr; "" if it names no version.

    Raises:
        EngineFault: the program could not be started.
    """
    done = _finished([str(path), "--version"])
    said = re.search(r"^version: *(\S.*)$", f"{done.stdout}\n{done.stderr}", re.MULTILINE)
    return "" if said is None else said[1].strip()


def _finished(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.run(
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
