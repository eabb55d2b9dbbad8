"""Blocks to write and read, and a process that writes them until it is killed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from penstock.contract.plan import Save
from penstock.store import BlockStore, open_folder

SIZE, BYTES = 4, 6000
FACTS = {"model": "tiny", "isa": "any"}


def open_store(root: Path, block_bytes: int = BYTES, **facts: str) -> BlockStore:
    return BlockStore(open_folder(root, {**FACTS, **facts}, SIZE, block_bytes))


def save_of(number: int) -> Save:
    key = hashlib.sha256(b"key %d" % number).digest()
    parent = hashlib.sha256(b"key %d" % (number - 1)).digest()
    return Save(number, key, parent, number, tuple(range(number, number + SIZE)))


def body_of(number: int, block_bytes: int = BYTES) -> bytes:
    piece = hashlib.sha256(b"body %d" % number).digest()
    return (piece * (block_bytes // len(piece) + 1))[:block_bytes]


def fill(store: BlockStore, numbers: range) -> None:
    for number in numbers:
        store.write(save_of(number), body_of(number))


def main() -> None:
    """Write blocks from a number on, for ever."""
    store, number = open_store(Path(sys.argv[1]), int(sys.argv[3])), int(sys.argv[2])
    print("writing", flush=True)
    while True:
        store.write(save_of(number), body_of(number, int(sys.argv[3])))
        number += 1


if __name__ == "__main__":
    main()
