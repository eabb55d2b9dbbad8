"""How much memory can still be allocated on a device: the machine's free memory, or what control groups leave.

Decides what counts as free: pages with a file's contents do, since the system takes them back first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["free_memory"]

_HOST = torch.device("cpu")
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""File names of limit, usage and file pages, for control groups version 2 (hierarchy without name) and 1."""


def free_memory(
    device: torch.device, meminfo: Path = _MEMINFO, own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS
) -> int:
    """Bytes that can still be allocated on `device`: without swapping, within the limits of all control groups above.

    Args:
        device: a CPU or a CUDA device.
        meminfo: where Linux describes its memory.
        own_groups: where Linux lists the control groups of this process.
        groups: where control groups are mounted, of either version.
    """
    if device != _HOST:
        return torch.cuda.mem_get_info(device)[0]
    return min([_machine_memory(meminfo), *_left_by_groups(own_groups, groups)])


def _machine_memory(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no better figure: assume half is taken


def _left_by_groups(own_groups: Path, groups: Path) -> Iterator[int]:
    """What each group with a limit leaves, from this process's own up to the root."""
    for folder, names in _memory_groups(own_groups, groups):
        limit_name, used_name, cached_name = names
        limit, used = folder / limit_name, folder / used_name
        if not (limit.exists() and used.exists()) or limit.read_text().strip() == "max":
            continue
        cached = _stat(folder / "memory.stat", cached_name)
        yield max(0, int(limit.read_text()) - max(0, int(used.read_text()) - cached))


def _memory_groups(own_groups: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders and their files' names. In a container the path may be the host's, and only its root exists there."""
    for line in own_groups.read_text().splitlines() if own_groups.exists() else ["0::/"]:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _FILES:
                root = groups / controller
                own = root / path.lstrip("/")
                for folder in (own, *own.parents):
                    if folder.is_relative_to(root):
                        yield folder, _FILES[controller]


def _stat(file: Path, name: str) -> int:
    if file.exists():
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
