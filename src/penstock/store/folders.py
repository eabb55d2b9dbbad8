"""The folders of a store: one for each contract, which says in words what its blocks were computed with.

    <root>/lock
    <root>/<contract>/about.json, tmp/, 00/ to ff/

Blocks of another model, format, instruction set or version of the kernels are in another folder, so that a key finds
only bits that would be computed again exactly so. Decides where folders are and what they say of themselves.
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
"""The fact `holds` of a folder of states, each under the key of the block that it follows; blocks have none."""

OPEN = "tmp"
"""The folder of files that are being written."""


def store_root(option: str, cache_dir: Path) -> Path | None:
    """Where blocks are kept by the option `kv_store`; None for nowhere."""
    if option in ("off", ""):
        return None
    return cache_dir / "kv-blocks" if option == "auto" else Path(option).expanduser()


def why_not_usable(root: Path) -> str:
    """Make the folder of a store, if it is not there; why nothing can be kept in it, "" where something can."""
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
        facts: what the bits depend on, name by name; `model` is the model's name.
        form: of its files.
    """

    path: Path
    facts: Mapping[str, str]
    form: FileForm

    def make(self) -> None:
        """Make the folder, if it is not there: another process may have cleared it.

        Raises:
            OSError: it cannot be made.
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
        """How many blocks are in it, and bytes: all files are of one length, so that none is looked at."""
        count = sum(1 for _ in block_files(self.path))
        return count, count * self.form.file_bytes

    def used(self) -> float:
        """When a block of it was written or read last, in seconds since 1970; 0.0 where there is none."""
        return max((entry.stat().st_mtime for entry in block_files(self.path)), default=0.0)


def open_folder(root: Path, facts: Mapping[str, str], block_size: int, block_bytes: int) -> StoreFolder:
    """The folder of what `facts` say, made if it is not there.

    Raises:
        OSError: it cannot be made.
    """
    whole = {"facts": dict(facts), "block_size": block_size, "block_bytes": block_bytes}
    contract = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()
    path = root / contract.hex()[:32]
    folder = StoreFolder(path, dict(facts), FileForm(contract, block_size, block_bytes))
    folder.make()
    return folder


def folder_at(path: Path) -> StoreFolder:
    """The folder that was made at `path`.

    Raises:
        OSError, ValueError, KeyError, TypeError: there is none.
    """
    about: dict[str, Any] = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    form = FileForm(bytes.fromhex(about["contract"]), int(about["block_size"]), int(about["block_bytes"]))
    return StoreFolder(path, about["facts"], form)


def folders(root: Path) -> Iterator[StoreFolder]:
    """Every folder of a store, in order of name; what is none is left out."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield folder_at(path)


def block_files(path: Path) -> Iterator[os.DirEntry[str]]:
    """The files of all blocks in a contract's folder; what vanishes meanwhile is left out."""
    with suppress(OSError), os.scandir(path) as shards:
        for shard in shards:
            if len(shard.name) == 2:
                with suppress(OSError), os.scandir(shard.path) as files:
                    yield from files


def clear(root: Path, folder: StoreFolder | None = None) -> int:
    """Delete one folder of a store, or all of them; how many blocks went. Who uses them meanwhile computes."""
    chosen = list(folders(root)) if folder is None else [folder]
    count = 0
    for each in chosen:
        count += each.size()[0]
        shutil.rmtree(each.path, ignore_errors=True)
    return count
