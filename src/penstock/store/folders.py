"""The folders of a store: one for each contract, with a description of what its blocks were computed with.

    <root>/lock
    <root>/<contract>/about.json, tmp/, 00/ to ff/

Blocks of another model, format, instruction set or kernel version are in another folder, so a key finds only bits that
a recomputation would give exactly. Decides where folders are and how they are described.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.store.block_file import FileForm

__all__ = [
    "ABOUT",
    "OPEN",
    "STATES",
    "StoreFolder",
    "block_files",
    "clear",
    "folder_at",
    "folders",
    "open_folder",
    "store_root",
    "why_not_usable",
]

ABOUT = "about.json"
STATES = "recurrent states"
"""The fact `holds` in a folder of states, each under the key of the block that it follows; block folders lack it."""

OPEN = "tmp"
"""The subfolder of files that are being written."""


def store_root(option: str, cache_dir: Path) -> Path | None:
    """Where the option `kv_store` says to keep blocks; None if nowhere."""
    if option in ("off", ""):
        return None
    return cache_dir / "kv-blocks" if option == "auto" else Path(option).expanduser()


def why_not_usable(root: Path) -> str:
    """Create a store's directory if it is missing; returns why it cannot be used, or "" if it can."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(root, os.R_OK | os.W_OK | os.X_OK) else "it is not writable"


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """All blocks of one contract.

    Attributes:
        path: where it is.
        facts: what the bits depend on, as values by name; `model` is the model's name.
        form: the form of its files.
    """

    path: Path
    facts: Mapping[str, str]
    form: FileForm

    def make(self) -> None:
        """Create the folder if it is missing: another process may have cleared it.

        Raises:
            OSError: it cannot be created.
        """
        for each in (self.path.parent, self.path, self.path / OPEN):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.path / ABOUT
        if not about.exists():
            form = self.form
            said = {"facts": dict(self.facts), "block_size": form.block_size, "block_bytes": form.block_bytes}
            written = self.path / OPEN / f"about-{os.getpid()}"
            written.write_text(json.dumps({**said, "contract": form.contract.hex()}, indent=1) + "\n", "utf-8")
            written.rename(about)

    def size(self) -> tuple[int, int]:
        """Number of blocks, and their bytes: all files have the same length, so none is examined."""
        count = sum(1 for _ in block_files(self.path))
        return count, count * self.form.file_bytes

    def used(self) -> float:
        """When one of its blocks was last written or read, in seconds since 1970; 0.0 if it has none."""
        return max((entry.stat().st_mtime for entry in block_files(self.path)), default=0.0)


def open_folder(root: Path, facts: Mapping[str, str], block_size: int, block_bytes: int) -> StoreFolder:
    """The folder of these facts and sizes, created if missing.

    Raises:
        OSError: it cannot be created.
    """
    whole = {"facts": dict(facts), "block_size": block_size, "block_bytes": block_bytes}
    contract = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()
    path = root / contract.hex()[:32]
    folder = StoreFolder(path, dict(facts), FileForm(contract, block_size, block_bytes))
    folder.make()
    return folder


def folder_at(path: Path) -> StoreFolder:
    """The existing folder at `path`.

    Raises:
        OSError, ValueError, KeyError, TypeError: there is none.
    """
    about: dict[str, Any] = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    form = FileForm(bytes.fromhex(about["contract"]), int(about["block_size"]), int(about["block_bytes"]))
    return StoreFolder(path, about["facts"], form)


def folders(root: Path) -> Iterator[StoreFolder]:
    """Every folder of a store, by name; other directories are skipped."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield folder_at(path)


def block_files(path: Path) -> Iterator[os.DirEntry[str]]:
    """The files of all blocks in a contract's folder; those that vanish meanwhile are skipped."""
    with suppress(OSError), os.scandir(path) as shards:
        for shard in shards:
            if len(shard.name) == 2:
                with suppress(OSError), os.scandir(shard.path) as files:
                    yield from files


def clear(root: Path, folder: StoreFolder | None = None) -> int:
    """Delete one folder of a store, or all; returns how many blocks were deleted. Processes that use them recompute."""
    chosen = list(folders(root)) if folder is None else [folder]
    count = 0
    for each in chosen:
        count += each.size()[0]
        shutil.rmtree(each.path, ignore_errors=True)
    return count
