"""KV blocks in files, so that they outlive the process. Knows bytes and keys, but no models or tensors."""

from penstock.store.block_file import FileForm, Origin
from penstock.store.block_store import BlockStore
from penstock.store.budget import DiskBudget, default_bytes
from penstock.store.folders import (
    STATES,
    StoreFolder,
    clear,
    folder_at,
    folders,
    open_folder,
    store_root,
    why_not_usable,
)
from penstock.store.prefixes import StatefulPrefixes
from penstock.store.writer import BlockWriter, Shelf

__all__ = [
    "STATES",
    "BlockStore",
    "BlockWriter",
    "DiskBudget",
    "FileForm",
    "Origin",
    "Shelf",
    "StatefulPrefixes",
    "StoreFolder",
    "clear",
    "default_bytes",
    "folder_at",
    "folders",
    "open_folder",
    "store_root",
    "why_not_usable",
]
