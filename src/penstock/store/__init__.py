"""KV blocks in files, so that they outlive the process. Knows bytes and keys, neither models nor tensors."""

from penstock.store.block_file import FileForm
from penstock.store.block_store import BlockStore
from penstock.store.budget import DiskBudget, default_bytes
from penstock.store.folders import StoreFolder, clear, folders, open_folder
from penstock.store.writer import BlockWriter

__all__ = [
    "BlockStore",
    "BlockWriter",
    "DiskBudget",
    "FileForm",
    "StoreFolder",
    "clear",
    "default_bytes",
    "folders",
    "open_folder",
]
