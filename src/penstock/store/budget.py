"""How much of a disk a store may take, and which blocks are evicted when it exceeds that: the least recently used.

Whatever the budget, a part of the disk stays free for other uses: if these need space, the store shrinks.

The time of last use is a file's modification time, which `BlockStore` updates when it reads. Several processes share
one budget: each scans all files now and then, counts its own writes in between, and only one at a time evicts. So the
store may exceed the budget by what each process writes between two scans, a 32nd of the budget.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.store.folders import OPEN, block_files, folders

__all__ = ["DiskBudget", "default_bytes"]

_SHARE = 10
"""The default budget is one part in this many of the free disk."""

_MOST_BYTES = 16 << 30
"""Upper bound of the default budget: a store that nobody asked for stays small on a large disk."""

_LEAST_FREE, _MOST_FREE, _FREE_SHARE = 256 << 20, 4 << 30, 20
"""Bytes of the disk to leave free: one part in `_FREE_SHARE` of its size, within these bounds."""

_LOOKS = 32
_LEFT = 0.95
"""Share of the budget that is left after an eviction, so that not every new block causes one."""

_ABANDONED = 600.0
"""Seconds after which a file that is being written counts as abandoned: its process is gone."""


def default_bytes(root: Path) -> int:
    """A tenth of the free disk, counting the store's own files as free; at most 16 GiB."""
    held = sum(folder.size()[1] for folder in folders(root))
    return min(_MOST_BYTES, (_disk_of(root).free + held) // _SHARE)


def _spare_bytes(root: Path) -> int:
    """Bytes that may still be written to the disk of `root`; negative if too little is left free for others."""
    disk = _disk_of(root)
    return disk.free - min(_MOST_FREE, max(_LEAST_FREE, disk.total // _FREE_SHARE))


def _disk_of(root: Path) -> shutil._ntuple_diskusage:
    """Usage of the disk that `root` is on, or will be on."""
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists()))


class DiskBudget:
    """Keeps a store within its budget. Owned by the thread that writes.

    Args:
        root: the store's directory, for all contracts together.
        most: the budget in bytes.
        pause: called now and then during long work, so that other threads can run.
    """

    def __init__(self, root: Path, most: int, pause: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self.most = most
        self._pause = pause
        self._seen = 0
        self._written: int | None = None  # since the last scan; None before the first
        self.evicted = 0

    @property
    def taken(self) -> int:
        """Bytes of the store, as far as this process knows."""
        return self._seen + (self._written or 0)

    def make_room(self, count: int) -> None:
        """Evict blocks if writing `count` bytes would use space that is left free for others.

        Raises:
            OSError: there is still no room.
        """
        if _spare_bytes(self._root) >= count:
            return
        self.look()
        if _spare_bytes(self._root) < count:
            raise OSError(errno.ENOSPC, "what is free of the disk is left to others")

    def wrote(self, count: int) -> None:
        """Count `count` bytes that were written, and evict blocks if the store exceeds its budget."""
        if self._written is not None:
            self._written += count
        if self._written is None or self._written > self.most // _LOOKS or self.taken > self.most:
            self.look()

    def look(self) -> None:
        """Scan all files, and evict what exceeds the budget, unless another process is evicting."""
        found = []
        now = time.time()
        for folder in folders(self._root):
            self._drop_abandoned(folder.path, now)
            for number, entry in enumerate(block_files(folder.path)):
                if number % 32 == 0:
                    self._pause()
                with suppress(OSError):
                    of = entry.stat()
                    found.append((of.st_mtime, of.st_size, entry.path))
        self._seen, self._written = sum(size for _, size, _ in found), 0
        most = min(self.most, max(0, self._seen + _spare_bytes(self._root)))
        if self._seen > most:
            with _alone(self._root) as alone:
                if alone:
                    self._evict(sorted(found), most * _LEFT)

    def _evict(self, eldest_first: list[tuple[float, int, str]], left: float) -> None:
        for _, size, path in eldest_first:
            if self._seen <= left:
                return
            with suppress(OSError):
                os.unlink(path)
                self.evicted += 1
            self._seen -= size
            self._pause()

    def _drop_abandoned(self, folder: Path, now: float) -> None:
        with suppress(OSError):
            for path in (folder / OPEN).iterdir():
                with suppress(OSError):
                    if now - path.stat().st_mtime > _ABANDONED:
                        path.unlink()


@contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """Try to hold the store's lock within the `with` block; yields whether it is held."""
    import fcntl  # imported here because not every system has it

    descriptor = os.open(root / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
