"""Reads processes from Linux's /proc: children, memory, descriptors, processor time, and whether they are gone."""

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
    """Return the running processes that `pid` has started; none if it is gone."""
    found: list[int] = []
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            found += map(int, file.read_text(encoding="ascii").split())
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            continue
    return found


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def command_of(pid: int) -> list[str]:
    """Return a process's command line; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def name_of(pid: int) -> str:
    """Return the name that a process gives itself, up to 15 characters; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not collected its status yet."""
    fields = _stat(pid)
    return not fields or fields[0] == "Z"


def awaits(pid: int, number: int) -> bool:
    """Whether a process has a pending signal `number`: sent to it, and not taken yet."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
    return bool(pending >> (number - 1) & 1)


def own_bytes(pid: int) -> int:
    """Return the memory that a process and its descendants have for themselves (anonymous, in RAM); 0 if it is gone.

    Mapped files do not count: their share depends on which other processes have mapped them.
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
    """Count the open file descriptors of a process and its descendants."""
    return sum(_count(_PROC / str(each) / "fd") for each in family(pid))


def threads(pid: int) -> int:
    """Count the threads of a process and its descendants."""
    return sum(_count(_PROC / str(each) / "task") for each in family(pid))


def processor_seconds(pid: int) -> float:
    """Return the processor time, in seconds, that a process and its descendants have used: user and system, proc(5)."""
    ticks = sum(int(fields[11]) + int(fields[12]) for each in family(pid) if (fields := _stat(each)))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_share(seconds: float = 1.0) -> float:
    """Measure the share of all processors' time that is in use, 0 to 1, over `seconds` from now."""
    before = _machine_ticks()
    time.sleep(seconds)
    after = _machine_ticks()
    total, idle = (after[i] - before[i] for i in (0, 1))
    return (total - idle) / total if total else 0.0


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.01) -> float:
    """Wait until `condition` holds.

    Returns:
        Seconds that it took; infinity if it did not come true.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return float("inf")
        time.sleep(pause)
    return time.monotonic() - began


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty if the process is gone."""
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
    """Return the ticks of all processors since boot: all, and idle ones (including those that wait for a disk)."""
    numbers = [int(each) for each in (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return sum(numbers), numbers[3] + numbers[4]
