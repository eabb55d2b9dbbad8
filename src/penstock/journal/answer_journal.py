"""The answers that callers asked to store, with their texts, in an SQLite file.

Decides when they are written: one thread writes all pending changes in one transaction, in the order of the changes.
Only the latest state of an answer is held until then, so a slow disk costs no more memory than the answers themselves.
The server's `Store`, which has the answers in memory, decides how many are kept: the file follows it.

Deleted content is overwritten with zeros. If its owner deleted it, it is also removed from the write-ahead log at once;
a file system or a disk may still keep copies.

If the journal can no longer be written, it is given up with one line in the log: the server continues from memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.contract.journal import KeptAnswer
from penstock.journal.sqlite_file import OPTION, FileKind, open_file

__all__ = ["AnswerJournal"]

log = logging.getLogger("penstock.journal")

ANSWERS = FileKind(
    name="answers.sqlite",
    application_id=0x50454E41,  # "PENA"
    version=1,
    schema="""
CREATE TABLE kept (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model BLOB NOT NULL,
    content BLOB NOT NULL,
    UNIQUE (kind, id)
)
""",
    erases=True,
)


class _Removal(Enum):
    """How to remove an answer."""

    DROP = "drop"
    DELETE = "delete"


Change = KeptAnswer | _Removal


class AnswerJournal:
    """Stored answers in a directory; see the module. All but `settled` and `holds` may be called from any thread.

    Args:
        directory: created if missing.

    Attributes:
        model: digest of everything that answers depend on besides their requests (`model_digest`). It is written with
            every answer, so it must be set before the first.

    Raises:
        ConfigError: the directory or the file in it cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.model = b""
        self._path = directory / ANSWERS.name
        self._open = True
        self._failed = False
        self._lock = threading.Lock()
        self._changes: dict[tuple[str, str], Change] = {}  # by latest change; guarded by the lock
        self._latest: Future[None] | None = None  # ends when all changes so far are written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._connection = self._thread.submit(open_file, directory, ANSWERS).result()

    def load(self, kind: str) -> Sequence[KeptAnswer]:
        """See `AnswerJournal.load`."""
        try:
            return self._thread.submit(self._select, kind).result()
        except sqlite3.Error as error:
            message = f"{self._path} cannot be used: {error}; move it away to begin a new one"
            raise ConfigError(OPTION, message) from error

    async def holds(self, answer_id: str) -> bool:
        """See `AnswerJournal.holds`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._has, answer_id)

    def put(self, answer: KeptAnswer) -> None:
        """See `AnswerJournal.put`."""
        self._change((answer.kind, answer.id), answer)

    def drop(self, kind: str, answer_id: str) -> None:
        """See `AnswerJournal.drop`."""
        self._change((kind, answer_id), _Removal.DROP)

    def delete(self, kind: str, answer_id: str) -> None:
        """See `AnswerJournal.delete`."""
        self._change((kind, answer_id), _Removal.DELETE)

    async def settled(self) -> None:
        """See `AnswerJournal.settled`."""
        latest = self._latest
        if latest is not None and not latest.done():
            await asyncio.shield(asyncio.wrap_future(latest))  # cancelling one waiter must not cancel the write

    def close(self) -> None:
        """Write pending changes, and close the file. Nothing is written afterwards."""
        with self._lock:
            self._open = False
        with contextlib.suppress(sqlite3.Error):  # the disk failed; everything that could be saved was
            self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _change(self, key: tuple[str, str], change: Change) -> None:
        with self._lock:
            if self._failed or not self._open:
                return
            if not self._changes:  # otherwise the pending write includes this change
                self._latest = self._thread.submit(self._write)
            self._changes.pop(key, None)
            self._changes[key] = change

    def _write(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, {}
        try:
            with self._connection:
                for (kind, answer_id), change in changes.items():
                    self._apply(kind, answer_id, change)
            if _Removal.DELETE in changes.values():
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            self._give_up(error)

    def _apply(self, kind: str, answer_id: str, change: Change) -> None:
        if isinstance(change, KeptAnswer):
            self._connection.execute(
                "INSERT OR REPLACE INTO kept (kind, id, tenant, model, content) VALUES (?, ?, ?, ?, ?)",
                (kind, answer_id, change.tenant, self.model, change.content),
            )
        else:
            self._connection.execute("DELETE FROM kept WHERE kind = ? AND id = ?", (kind, answer_id))

    def _give_up(self, error: sqlite3.Error) -> None:
        with self._lock:
            self._failed = True
            self._changes.clear()
        log.error(
            "the journal is given up: answers that are stored from now on end with this server, and what is deleted"
            " from now on stays in %s: %s",
            self._path,
            error,
        )

    def _has(self, answer_id: str) -> bool:
        try:
            return bool(self._connection.execute("SELECT 1 FROM kept WHERE id = ?", (answer_id,)).fetchone())
        except sqlite3.Error as error:
            log.error("%s cannot be read: %s", self._path, error)
            return False

    def _select(self, kind: str) -> list[KeptAnswer]:
        rows = self._connection.execute(
            "SELECT id, tenant, content, model FROM kept WHERE kind = ? ORDER BY number", (kind,)
        )
        return [
            KeptAnswer(kind, answer_id, tenant, content, same_model=model == self.model)
            for answer_id, tenant, content, model in rows
        ]
