"""Finds out which processors this process runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["cpus", "processor_name"]

_CPUINFO = Path("/proc/cpuinfo")


def cpus() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's model name; its architecture if the system does not say."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
