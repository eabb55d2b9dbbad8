"""The default command in a process of its own: `penstock serve` with few flags but the port, and what it recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import preloaded

START_LIMIT = 300.0  # seconds; far more than it takes, since tests run on busy machines
PATIENCE = 60.0  # seconds
FLEET = os.environ.get("PENSTOCK_TEST_FLEET", "")
"""How many replicas servers of tests have, on Ray; "" for one engine without it. `make test-ray` says 2."""
ALONE = "--no-standby"
"""A server of a test does without a zygote where nobody kills its runner: it is the same but for one process."""

Process = subprocess.Popen[str] | preloaded.Forked


def start(*arguments: str, forked: bool = True, **environment: str) -> Process:
    """`penstock ARGUMENTS` in a process of its own; its output, errors too, is `stdout`.

    `forked`: from a process that has imported everything, where that is possible. A test that looks for the processes
    below it, or is about how it starts, says False.
    """
    environment = {"PYTHONUNBUFFERED": "1", **environment}
    if forked and sys.platform == "linux":
        return preloaded.popen(arguments, **environment)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    trace: Path
    process: Process
    seconds_to_listen: float
    _plans: list[dict[str, Any]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)  # how many of each trace's plans were read

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health").json()

    def wait_running(self, count: int) -> None:
        """Wait until this many requests run."""
        last = time.monotonic() + PATIENCE
        while (health := self.health())["running"] < count:
            assert time.monotonic() < last, health
            time.sleep(0.02)

    def wait_idle(self, seconds: float) -> float:
        """Wait until every block is back; returns the processor seconds that the server used meanwhile."""
        began, last = self._processor_seconds(), time.monotonic() + PATIENCE
        while True:
            health, taken = self.health(), self._processor_seconds() - began
            if health["running"] == health["waiting"] == 0 and health["free_blocks"] == health["total_blocks"]:
                return taken
            assert taken < seconds, health
            assert time.monotonic() < last, health
            time.sleep(0.02)

    def _processor_seconds(self) -> float:
        """Seconds that the server has used: utime and stime of proc(5), or the wall clock if there is no proc."""
        file = Path(f"/proc/{self.process.pid}/stat")
        if not file.exists():
            return time.monotonic()
        fields = file.read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def plans(self) -> list[dict[str, Any]]:
        """Every plan recorded so far; those of a fleet's replicas in the order in which they were read here."""
        traces = [self.trace] if self.trace.exists() else sorted(self.trace.parent.glob(self.trace.name + ".*"))
        for trace in traces:
            lines = trace.read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines if line.endswith("}")]
            plans = [record["plan"] for record in records if "plan" in record]
            self._plans.extend(plans[self._read.get(trace, 0) :])
            self._read[trace] = len(plans)
        return list(self._plans)


@contextmanager
def serve(trace: Path, *arguments: str, standby: bool = False, forked: bool = True) -> Iterator[Served]:
    """A server. `standby`: with a zygote, as by default. `forked`: see `start`; never with a standby or a fleet."""
    arguments = (*arguments, *(() if standby else (ALONE,)))
    command = ("serve",)
    if FLEET:
        command = ("fleet", "--replicas", FLEET)
        if "--profile-dir" in arguments:
            at = arguments.index("--profile-dir")
            arguments = (*arguments[:at], *arguments[at + 2 :])
    began = time.monotonic()
    apart = standby or FLEET or not forked
    process = start(*command, "--port", "0", "--record", str(trace), *arguments, forked=not apart)
    try:
        url = listening_url(process, began)
        yield Served(url, trace, process, time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def killed_at_the_end(journal: Path, **environment: str) -> Iterator[str]:
    """The URL of a server with a journal, which is killed at the end of the block."""
    with start("serve", "--port", "0", "--journal", str(journal), ALONE, **environment) as process:
        try:
            yield listening_url(process, time.monotonic())
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that a server does."""
    last = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < last, "it did not happen in time"
        time.sleep(0.01)


def listening_url(process: Process, began: float, said: list[str] | None = None) -> str:
    said = [] if said is None else said
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        found = re.search(r"http://\S+", line)
        if found:
            return found[0]
        assert time.monotonic() - began < START_LIMIT, said
    raise AssertionError(f"the server ended before it listened: {said}")


def runners_of(pid: int) -> list[int]:
    """The process that computes for the server `pid`, and its zygote."""
    return [each for each in below(pid) if b"penstock.runner_process" in process_file(each, "cmdline")]


def runner_of(pid: int) -> int:
    """The process that computes for the server `pid`: it takes that name once it has imported everything."""
    runners = [each for each in runners_of(pid) if process_file(each, "comm") == b"penstock-runner\n"]
    assert runners, "there is none"
    return runners[-1]


def below(pid: int) -> Iterator[int]:
    """The processes that `pid` started, directly or not."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:  # it has ended since it was listed
        return
    for thread in threads:
        for child in map(int, process_file(pid, f"task/{thread}/children").split()):
            yield child
            yield from below(child)


def process_file(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process, or the thread asked about, has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
