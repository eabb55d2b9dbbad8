"""The streams that were started, in an SQLite file.

It contains no text of requests or answers. One server at a time uses the file (`sqlite_file`). Its size is bounded: if
there are too many rows, the oldest are deleted, and their pages are reused.

If the journal can no longer be written (the disk is full, or gone), it is given up with one line in the log; streams
that are already in it can still be found while it can be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.contract.journal import BegunStream
from penstock.journal.sqlite_file import FileKind, open_file

__all__ = ["StreamJournal"]

log = logging.getLogger("penstock.journal")

T = TypeVar("T")
STREAMS = FileKind(
    name="streams.sqlite",
    application_id=0x50454E53,  # "PENS"
    version=1,
    schema="""
CREATE TABLE begun (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    digest BLOB NOT NULL,
    created INTEGER NOT NULL,
    model BLOB NOT NULL
)
""",
)
MOST_STREAMS = 100_000
"""Most streams to keep; each takes about 300 bytes, with its index."""


class StreamJournal:
    """A journal in a directory; see the module. `add` and `find` may be called from any event loop.

    Args:
        directory: created if missing.
        most: how many streams to keep.

    Attributes:
        model: digest of everything that answers depend on besides their requests (`model_digest`). It is written with
            every stream, so it must be set before the first.

    Raises:
        ConfigError: the directory or the file in it cannot be used.
    """

    def __init__(self, directory: Path, most: int = MOST_STREAMS) -> None:
        self.model = b""
        self._most = most
        self._writing = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._connection = self._thread.submit(open_file, directory, STREAMS).result()

    async def add(self, begun: BegunStream) -> None:
        """See `Journal.add`."""
        row = (begun.id, begun.tenant, begun.digest, begun.created, self.model)
        await self._run(lambda: self._insert(row))

    async def find(self, answer_id: str) -> BegunStream | None:
        """See `Journal.find`."""
        return await self._run(lambda: self._select(answer_id))

    def close(self) -> None:
        """Close the file. Nothing is written afterwards."""
        self._writing = False
        with contextlib.suppress(sqlite3.Error):  # the disk failed; everything that could be saved was
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
