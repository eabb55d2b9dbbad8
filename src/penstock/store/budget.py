"""How much of a disk a store may take, and which blocks go when that is too little: those that were not used longest.

A part of the disk is left to others, whatever the budget: where they need it, the store gives way.

Use is a file's time of modification, which `BlockStore` sets when it reads. Several processes share one budget: each
looks at all files now and then, counts its own writes in between, and only one of them at a time deletes. So the sum
may exceed the budget by what each writes between two looks, a 32nd of it.
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
"""Of the disk that is free, what a store may take: one part in so many."""

_MOST_BYTES = 16 << 30
"""Of a default: a store that nobody asked for stays small beside a large disk."""

_LEAST_FREE, _MOST_FREE, _FREE_SHARE = 256 << 20, 4 << 30, 20
"""Bytes of the disk that are left free: a part in so many of it, within these bounds."""

_LOOKS = 32
_LEFT = 0.95
"""Share of the budget that is left after blocks were deleted, so that it is not done for each new one."""

_ABANDONED = 600.0
"""Seconds after which a file that is being written belongs to nobody: its process is gone."""


def default_bytes(root: Path) -> int:
    """A tenth of the disk that is free beside the store, 16 GiB at most; what the store has counts as free."""
    held = sum(folder.size()[1] for folder in folders(root))
    return min(_MOST_BYTES, (_disk_of(root).free + held) // _SHARE)


def _spare_bytes(root: Path) -> int:
    """What may still be written to the disk that `root` is on; below 0 where others lack it."""
    disk = _disk_of(root)
    return disk.free - min(_MOST_FREE, max(_LEAST_FREE, disk.total // _FREE_SHARE))


def _disk_of(root: Path) -> shutil._ntuple_diskusage:
    """Of the disk that `root` is on, or will be."""
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists()))


class DiskBudget:
    """Keeps a store within so many bytes. Owned by the thread that writes.

    Args:
        root: of the store, all contracts together.
        most: bytes.
        pause: called now and then in long work, so that others get on.
    """

    def __init__(self, root: Path, most: int, pause: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self.most = most
        self._pause = pause
        self._seen = 0
        self._written: int | None = None  # since the last look; None before the first
        self.evicted = 0

    @property
    def taken(self) -> int:
        """Bytes of the store, as far as this process knows."""
        return self._seen + (self._written or 0)

    def make_room(self, count: int) -> None:
        """So many bytes are to be written: delete what is too much, if they would take what is left to others.

        Raises:
            OSError: even so there is no room.
        """
        if _spare_bytes(self._root) >= count:
            return
        self.look()
        if _spare_bytes(self._root) < count:
            raise OSError(errno.ENOSPC, "what is free of the disk is left to others")

    def wrote(self, count: int) -> None:
        """So many bytes are new; deletes what is too much."""
        if self._written is not None:
            self._written += count
        if self._written is None or self._written > self.most // _LOOKS or self.taken > self.most:
            self.look()

    def look(self) -> None:
        """Count everything, and delete what is too much, unless another process does."""
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
    """Whether no other process is here, until the end of the block."""
    import fcntl  # which is not everywhere; nor is a store

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
