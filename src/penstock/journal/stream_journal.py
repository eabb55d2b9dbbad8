"""The streams that were begun, in a file of SQLite.

Decides how they are kept: in write-ahead mode, where a committed row survives the end of the process, however it comes,
without waiting for the disk; after a loss of power the latest rows may be missing. No text of a request or an answer is
in it. The file is one server's at a time. It is bounded: of too many rows the oldest are deleted, and their pages are
used again.

A journal that cannot be written any more (the disk is full, or gone) is given up with one line in the log; streams that
are in it already can still be found while it can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.contract.errors import ConfigError
from penstock.contract.journal import BegunStream

__all__ = ["StreamJournal"]

log = logging.getLogger("penstock.journal")

T = TypeVar("T")
OPTION = "journal"
FILE_NAME = "streams.sqlite"
APPLICATION_ID = 0x50454E53  # "PENS"
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE begun (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    digest BLOB NOT NULL,
    created INTEGER NOT NULL,
    model BLOB NOT NULL
)
"""
MOST_STREAMS = 100_000
"""Rows of about 300 bytes, with their index."""
WAL_BYTES = 4 * 1024 * 1024
"""What the write-ahead file is cut to at a checkpoint, which comes every thousand pages."""


class StreamJournal:
    """A journal in a directory; see the module. `add` and `find` may be called from any event loop.

    Args:
        directory: made if it is not there.
        most: how many streams are kept.

    Attributes:
        model: digest of all that answers depend on beside their requests (`model_digest`). It is written with every
            stream, so it must be set before the first.

    Raises:
        ConfigError: the directory or the file in it cannot be used.
    """

    def __init__(self, directory: Path, most: int = MOST_STREAMS) -> None:
        self.model = b""
        self._most = most
        self._writing = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._connection = self._thread.submit(_open, directory).result()

    async def add(self, begun: BegunStream) -> None:
        """See `Journal.add`."""
        row = (begun.id, begun.tenant, begun.digest, begun.created, self.model)
        await self._run(lambda: self._insert(row))

    async def find(self, answer_id: str) -> BegunStream | None:
        """See `Journal.find`."""
        return await self._run(lambda: self._select(answer_id))

    def close(self) -> None:
        """Let go of the file. Nothing is written afterwards."""
        self._writing = False
        with contextlib.suppress(sqlite3.Error):  # a disk that failed; all that could be kept is kept
            self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _insert(self, row: tuple[str, str, bytes, int, bytes]) -> None:
        if not self._writing:
            return
        try:
            with self._connection:
                cursor = self._connection.execute(
                    "INSERT OR IGNORE INTO begun (id, tenant, digest, created, model) VALUES (?, ?, ?, ?, ?)", row
                )
                if cursor.rowcount and cursor.lastrowid:
                    self._connection.execute("DELETE FROM begun WHERE number <= ?", (cursor.lastrowid - self._most,))
        except sqlite3.Error as error:
            self._writing = False
            log.error("the journal is given up, new streams will not survive the end of this server: %s", error)

    def _select(self, answer_id: str) -> BegunStream | None:
        try:
            row = self._connection.execute(
                "SELECT id, tenant, digest, created, model FROM begun WHERE id = ?", (answer_id,)
            ).fetchone()
        except sqlite3.Error as error:
            log.error("the journal cannot be read: %s", error)
            return None
        if row is None:
            return None
        stream_id, tenant, digest, created, model = row
        return BegunStream(stream_id, tenant, digest, created, same_model=model == self.model)


def _open(directory: Path) -> sqlite3.Connection:
    path = directory / FILE_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ConfigError(OPTION, f"{path} cannot be written to: {error.strerror}") from error
    connection = sqlite3.connect(path, timeout=0)
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
            raise ConfigError(OPTION, f"{path} is in use by another server; give each its own directory") from error
        raise ConfigError(OPTION, f"{path} cannot be used: {error}; move it away to begin a new one") from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Take the file for this process alone, and make the table in a new one. Another's is left as it is."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    kept = tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    new = kept == (0, 0) and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if not new and kept != (APPLICATION_ID, SCHEMA_VERSION):
        raise ConfigError(OPTION, f"{path} is no journal of this version of Penstock; move it away to begin a new one")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    connection.execute("BEGIN IMMEDIATE")  # takes the lock, which is kept until the end
    if new:
        connection.execute(SCHEMA)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.commit()
