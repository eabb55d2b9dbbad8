"""Runs a program with the Python of some installation, and exchanges lines of JSON with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["Worker"]


class Worker:
    """An installation in a process of its own.

    Args:
        python: the installation's Python.
        program: the program that it runs; it prints an object when it is ready, and one for each line that it reads.
        arguments: arguments of the program.

    Attributes:
        ready: the first object.
    """

    def __init__(self, python: str, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready = self._read()

    def run(self, load: Mapping[str, Any]) -> dict[str, Any]:
        """Send a load, and wait for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(load)) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a worker ended:\n{self._process.communicate()[1]}")
        found: dict[str, Any] = json.loads(line)
        return found
