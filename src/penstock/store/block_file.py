"""The file format of one KV block: what identifies the block, and its bytes, protected by a checksum.

    magic, version, tokens, bytes, blocks before it, contract, key, parent | SHA-256 of the rest | tokens | bytes

All numbers are little-endian. The checksum covers every byte but its own, and the form fixes a file's exact length, so
any change, truncation or addition is detected. Decides the format; opens no file.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

from penstock.contract.plan import Save

__all__ = ["Bytes", "FileForm", "Origin"]

Bytes = bytes | bytearray | memoryview

_MAGIC = b"PENSTKV\n"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQ32s32s32s")
_SUM_BYTES = 32


class Origin(NamedTuple):
    """Which block a file holds; the fields of `Save`, except for the block id."""

    key: bytes
    parent: bytes
    before: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileForm:
    """What all files of one folder have in common.

    Attributes:
        contract: 32 bytes that identify everything that the bits of a block depend on besides its key.
        block_size: tokens per block.
        block_bytes: bytes of its keys and values.
    """

    contract: bytes
    block_size: int
    block_bytes: int

    @property
    def file_bytes(self) -> int:
        """Length of every file."""
        return self._body_start + self.block_bytes

    def encode(self, save: Save, body: Bytes) -> list[Bytes]:
        """The parts of a block's file, in order."""
        head = self._head(save.key, save.parent, save.before)
        tokens = struct.pack(f"<{self.block_size}Q", *save.tokens)
        return [head, _checksum(head, tokens, body), tokens, body]

    def body(self, content: memoryview) -> memoryview:
        """The block's bytes in a file's `content`, which `origin` has checked."""
        return content[self._body_start :]

    def origin(self, content: memoryview) -> Origin | None:
        """Which block a file's `content` holds; None if it is not exactly what was written."""
        if len(content) != self.file_bytes:
            return None
        *_, before, _, key, parent = _HEAD.unpack_from(content)
        start = _HEAD.size + _SUM_BYTES
        head, found = content[: _HEAD.size], content[_HEAD.size : start]
        tokens, body = content[start : self._body_start], content[self._body_start :]
        if head != self._head(key, parent, before) or found != _checksum(head, tokens, body):
            return None
        return Origin(key, parent, before, struct.unpack(f"<{self.block_size}Q", tokens))

    @property
    def _body_start(self) -> int:
        return _HEAD.size + _SUM_BYTES + 8 * self.block_size

    def _head(self, key: bytes, parent: bytes, before: int) -> bytes:
        return _HEAD.pack(_MAGIC, _VERSION, self.block_size, self.block_bytes, before, self.contract, key, parent)


def _checksum(*parts: Bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
