"""Runs `penstock serve` in a process of its own, on a free port; it ends with the block that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from harness.processes import command_of, family, gone, name_of, wait_until

__all__ = ["APART", "PENSTOCK", "PLANTED", "Server", "serving"]

PENSTOCK = (sys.executable, "-m", "penstock")
PLANTED = (sys.executable, "-m", "planted.server")
"""The same program with faults in its runner's process; see `planted`."""
APART = ("--runner", "process")
"""Options of a server that computes in a second process."""

START_SECONDS = 300.0
END_SECONDS = 60.0
_RUNNER = "penstock-runner"
_RUNNER_PROGRAMS = {"penstock.runner_process", "planted.runner"}


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        log: the file that stdout and stderr go to.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self.url.rpartition(":")[2])

    def runner(self) -> int:
        """Return the process that computes for the server now, not the one that forks it; 0 while there is none."""
        runners = (each for each in family(self.pid) if name_of(each) == _RUNNER)
        return next((each for each in runners if set(command_of(each)) & _RUNNER_PROGRAMS), 0)

    def said(self) -> str:
        """Return everything the server has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def health(self, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the answer to `GET /health`."""
        body: dict[str, Any] = httpx.get(f"{self.url}/health", headers=dict(headers or {}), timeout=30).json()
        return body

    def idle(self, headers: Mapping[str, str] | None = None) -> bool:
        """Whether no request runs or waits, and every block is back."""
        now = self.health(headers)
        return bool(now["running"] == now["waiting"] == 0 and now["free_blocks"] == now["total_blocks"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if there is none."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{|\s)", line))


@contextmanager
def serving(
    *arguments: str,
    program: Sequence[str] = PENSTOCK,
    environment: Mapping[str, str] | None = None,
    ends_with: int | None = 0,
    stderr: Any = None,
    before: Any = None,
) -> Iterator[Server]:
    """Start a server, and wait until it listens.

    Args:
        arguments: options of `penstock serve`, and the model if it is not the default.
        program: the program to run.
        environment: variables that are added to this process's.
        ends_with: the status that the server must end with after SIGTERM; None if the block ends the server.
        stderr: where its standard error goes instead of the log.
        before: called in the new process before the program is run.

    Raises:
        RuntimeError: the server ended before it listened, or ended with another status.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-reliability-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*program, "serve", "--port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if stderr is None else stderr,
                env={**os.environ, **_APART, **_path_of(program), **(environment or {})},
                preexec_fn=before,
            )
        try:
            yield Server(_listening_url(process, log), process, log)
            if ends_with is not None:
                _end(process, log, ends_with)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


_APART = {"PYTHONUNBUFFERED": "1", "PENSTOCK_KV_STORE": "off"}
"""Variables of every server: it reads no KV blocks that another server computed, unless its row says so."""


def _path_of(program: Sequence[str]) -> dict[str, str]:
    """Return the search path that a program with faults needs; empty for the product itself."""
    return {"PYTHONPATH": str(Path(__file__).parent.parent)} if program is PLANTED else {}


def _listening_url(process: subprocess.Popen[bytes], log: Path) -> str:
    last = time.monotonic() + START_SECONDS
    while time.monotonic() < last:
        text = log.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        if found:
            return found[0]
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it listened: {text[-600:]}")
        time.sleep(0.05)
    raise RuntimeError(f"the server did not listen within {START_SECONDS:.0f} s: {text[-600:]}")


def _end(process: subprocess.Popen[bytes], log: Path, status: int) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    below = family(process.pid)[1:]
    try:
        found = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the server did not end within {END_SECONDS:.0f} s of SIGTERM") from None
    if found != status:
        said = log.read_text(encoding="utf-8", errors="replace")[-600:]
        raise RuntimeError(f"the server ended with status {found} instead of {status}: {said}")
    wait_until(lambda: all(map(gone, below)), 2.0)
