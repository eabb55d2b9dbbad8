"""Where a record was measured: processor, memory, load, versions and commit, to explain why two records differ."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from penstock.processor import cpus, processor_name
from penstock.version import __version__

__all__ = ["cpus", "load_average", "provenance"]

_SOURCE = Path(__file__).resolve().parent


def provenance() -> dict[str, Any]:
    """Version, commit, time and machine, for the head of a record."""
    return {
        "penstock": __version__,
        "commit": commit(),
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": processor_name(),
            "cpus": cpus(),
            "memory_bytes": memory_bytes(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "load_average": load_average(),
        },
    }


def memory_bytes() -> int | None:
    """Physical memory in bytes; None if the system does not report it."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def load_average() -> float | None:
    """Average number of runnable processes over the last minute: above zero before a run, the machine was not idle."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def commit(folder: Path = _SOURCE) -> str:
    """The commit of the checkout that this code runs from, with `-dirty` if it was changed; "" outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (git, fixed arguments)
    return done.stdout.strip() if done.returncode == 0 else ""
