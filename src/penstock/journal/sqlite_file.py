"""Opening one of the journal's files: SQLite, for this process alone and readable by its owner alone.

Decides how it is kept: in write-ahead mode, where a committed row survives the end of the process, however it comes,
without waiting for the disk; after a loss of power the latest rows may be missing.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.errors import ConfigError

__all__ = ["OPTION", "FileKind", "open_file"]

OPTION = "journal"
WAL_BYTES = 4 * 1024 * 1024
"""What the write-ahead file is cut to at a checkpoint, which comes every thousand pages."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file.

    Attributes:
        name: in the journal's folder.
        application_id: tells it from other programs' files, and from those of other kinds.
        version: of the schema and of what its columns hold.
        schema: makes the one table of a new file.
        erases: whether what is deleted is overwritten with zeros.
    """

    name: str
    application_id: int
    version: int
    schema: str
    erases: bool = False


def open_file(directory: Path, kind: FileKind) -> sqlite3.Connection:
    """Open it, or make a new one; the connection belongs to the calling thread.

    Raises:
        ConfigError: the folder or the file cannot be used; names the file.
    """
    path = directory / kind.name
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        if path.stat().st_mode & 0o077:  # a copy, perhaps
            path.chmod(0o600)
    except OSError as error:
        raise ConfigError(OPTION, f"{path} cannot be written to: {error.strerror}") from error
    connection = sqlite3.connect(path, timeout=0)
    try:
        _prepare(connection, path, kind)
    except sqlite3.Error as error:
        connection.close()
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
            raise ConfigError(OPTION, f"{path} is in use by another server; give each its own directory") from error
        raise ConfigError(OPTION, f"{path} cannot be used: {error}; move it away to begin a new one") from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, kind: FileKind) -> None:
    """Take the file for this process alone, and make the table in a new one. Another's is left as it is."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    kept = tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    new = kept == (0, 0) and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if not new and kept != (kind.application_id, kind.version):
        raise ConfigError(OPTION, f"{path} is no journal of this version of Penstock; move it away to begin a new one")
    if kind.erases:
        connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    connection.execute("BEGIN IMMEDIATE")  # takes the lock, which is kept until the end
    if new:
        connection.execute(kind.schema)
        connection.execute(f"PRAGMA application_id = {kind.application_id}")
        connection.execute(f"PRAGMA user_version = {kind.version}")
    connection.commit()
