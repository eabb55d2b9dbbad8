"""Finds, reads and writes the blocks of one contract, each in a file under its key; no file is ever changed.

Any number of processes can use a folder at once. A file appears complete, renamed from a temporary name, and is never
written to again. Blocks are looked up by file name, so there is no index that another process could invalidate. Content
is checked when it is read: a damaged file is deleted, and counts as missing. So no wrong byte is ever returned, even if
a process is killed at any moment or a disk loses writes.

Files are read, not mapped. Either way all processes share the system's page cache, but a disk error makes `read` fail,
whereas in a mapped file it is a signal that kills the process.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

from penstock.contract.plan import Save
from penstock.store.block_file import Bytes, Origin
from penstock.store.folders import OPEN, StoreFolder

__all__ = ["BlockStore"]

_names = itertools.count()


class BlockStore:
    """One folder's blocks. Only one thread at a time may call `read` or `origin`; everything else is thread-safe.

    Attributes:
        damaged: how many files were found damaged, and deleted.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder
        self.damaged = 0
        self._form = folder.form
        self._path = str(folder.path)
        self._content = bytearray()

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many leading `keys` have a file now; the files may vanish later."""
        count = 0
        for key in keys:
            if not self.has(key):
                break
            count += 1
        return count

    def has(self, key: bytes) -> bool:
        """Whether `key` has a file now."""
        return os.path.exists(self._file(key))

    def read(self, key: bytes) -> memoryview | None:
        """The bytes of a block, valid until the next `read` or `origin`; None if it is missing or damaged."""
        content = self._checked(key)
        return None if content is None else self._form.body(content[0])

    def origin(self, key: bytes) -> tuple[Origin, bytes] | None:
        """Which block the file of `key` holds, and a copy of its bytes; None as in `read`."""
        content = self._checked(key)
        return None if content is None else (content[1], bytes(self._form.body(content[0])))

    def write(self, save: Save, body: Bytes) -> int:
        """Write a block, unless it exists.

        Args:
            save: which block it is.
            body: its bytes.

        Returns:
            Bytes of the new file; 0 if the block existed.

        Raises:
            OSError: the block cannot be written; nothing of it is left behind.
        """
        target = self._file(save.key)
        if os.path.exists(target):
            self.touch(save.key)
            return 0
        parts = self._form.encode(save, body)
        try:
            self._publish(target, parts)
        except FileNotFoundError:  # the first key with this prefix, or the folder was cleared
            self.folder.make()
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            self._publish(target, parts)
        return self._form.file_bytes

    def touch(self, key: bytes) -> None:
        """Mark a block as used now, so that others are evicted before it."""
        with suppress(OSError):
            os.utime(self._file(key))

    def remove(self, key: bytes) -> None:
        """Delete a block."""
        with suppress(OSError):
            os.unlink(self._file(key))

    def _file(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._path}/{name[:2]}/{name}"

    def _publish(self, target: str, parts: list[Bytes]) -> None:
        written = f"{self._path}/{OPEN}/{os.getpid()}-{threading.get_native_id()}-{next(_names)}"
        try:
            self._put(written, parts)
            os.rename(written, target)
        except OSError:
            with suppress(OSError):
                os.unlink(written)
            raise

    def _put(self, path: str, parts: list[Bytes]) -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            if os.writev(descriptor, parts) == self._form.file_bytes:
                return
            os.ftruncate(descriptor, 0)  # a full disk, or a signal: start over, and write in a loop
            os.lseek(descriptor, 0, os.SEEK_SET)
            rest = memoryview(b"".join(parts))
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    def _checked(self, key: bytes) -> tuple[memoryview, Origin] | None:
        try:
            content = self._load(self._file(key))
        except FileNotFoundError:
            return None
        except OSError:  # the disk cannot read it
            content = memoryview(b"")
        found = self._form.origin(content)
        if found is None or found.key != key:
            self.damaged += 1
            self.remove(key)
            return None
        return content, found

    def _load(self, path: str) -> memoryview:
        """A file's content; empty if it has the wrong length."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size != self._form.file_bytes:
                return memoryview(b"")
            if not self._content:
                self._content = bytearray(self._form.file_bytes)
            rest = content = memoryview(self._content)
            while rest:
                count = os.readv(descriptor, [rest])
                if not count:
                    return memoryview(b"")
                rest = rest[count:]
            os.utime(descriptor)
            return content
        finally:
            os.close(descriptor)
