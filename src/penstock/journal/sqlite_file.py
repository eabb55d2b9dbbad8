"""Opens one of the journal's SQLite files, locked by this process and readable only by its owner.

Decides its durability: in write-ahead mode, a committed row survives any end of the process without waiting for the
disk; after a power loss, the latest rows may be missing.
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
"""The size to which a checkpoint, every thousand pages, truncates the write-ahead log."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file.

    Attributes:
        name: file name in the journal's directory.
        application_id: distinguishes it from files of other programs and other kinds.
        version: version of the schema and of the format of its columns.
        schema: SQL that creates the one table of a new file.
        erases: whether deleted content is overwritten with zeros.
    """

    name: str
    application_id: int
    version: int
    schema: str
    erases: bool = False


def open_file(directory: Path, kind: FileKind) -> sqlite3.Connection:
    """Open the file, or create it; the connection belongs to the calling thread.

    Raises:
        ConfigError: the directory or the file cannot be used; names the file.
    """
    path = directory / kind.name
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        if path.stat().st_mode & 0o077:  # perhaps a copy
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
    """Lock the file for this process, and create the table in a new file. A foreign file is left unchanged."""
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
    connection.execute("BEGIN IMMEDIATE")  # takes the lock, which is held until the connection closes
    if new:
        connection.execute(kind.schema)
        connection.execute(f"PRAGMA application_id = {kind.application_id}")
        connection.execute(f"PRAGMA user_version = {kind.version}")
    connection.commit()
