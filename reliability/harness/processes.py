"""Processes as Linux shows them in /proc: children, memory, descriptors, processor time, and whether they are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "awaits",
    "busy_share",
    "children",
    "command_of",
    "descriptors",
    "family",
    "gone",
    "name_of",
    "processor_seconds",
    "own_bytes",
    "threads",
    "wait_until",
]

_PROC = Path("/proc")


def children(pid: int) -> list[int]:
    """Processes that `pid` has started and that are there; none where it is gone."""
    found: list[int] = []
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += map(int, file.read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            continue
    return found


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def command_of(pid: int) -> list[str]:
    """A process's command line; empty where it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def name_of(pid: int) -> str:
    """What a process calls itself, in 15 characters; empty where it is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pid: int) -> bool:
    """Whether a process has ended, or only waits to be asked for how."""
    fields = _stat(pid)
    return not fields or fields[0] == "Z"


def awaits(pid: int, number: int) -> bool:
    """Whether a signal has been sent to a process that has not taken it yet."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
    return bool(pending >> (number - 1) & 1)


def own_bytes(pid: int) -> int:
    """Memory that a process and all below it have for themselves (anonymous, in RAM); 0 where it is gone.

    Not what is mapped of files: how much of that counts depends on who else has mapped it.
    """
    total = 0
    for each in family(pid):
        try:
            lines = (_PROC / str(each) / "smaps_rollup").read_text(encoding="ascii").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return total


def descriptors(pid: int) -> int:
    """Open file descriptors of a process and all below it."""
    return sum(_count(_PROC / str(each) / "fd") for each in family(pid))


def threads(pid: int) -> int:
    """Threads of a process and all below it."""
    return sum(_count(_PROC / str(each) / "task") for each in family(pid))


def processor_seconds(pid: int) -> float:
    """Processor time that a process and all below it have used: user and system, proc(5)."""
    ticks = sum(int(fields[11]) + int(fields[12]) for each in family(pid) if (fields := _stat(each)))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_share(seconds: float = 1.0) -> float:
    """The share of all processors' time that somebody uses, 0 to 1, over some seconds from now."""
    before = _machine_ticks()
    time.sleep(seconds)
    after = _machine_ticks()
    total, idle = (after[i] - before[i] for i in (0, 1))
    return (total - idle) / total if total else 0.0


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.01) -> float:
    """Wait until `condition` holds.

    Returns:
        Seconds that it took; infinity where it did not come true.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return float("inf")
        time.sleep(pause)
    return time.monotonic() - began


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty where it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _count(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _machine_ticks() -> tuple[int, int]:
    """Ticks of all processors since the start: all, and idle ones (those that wait for a disk among them)."""
    numbers = [int(each) for each in (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return sum(numbers), numbers[3] + numbers[4]
