"""Names for KV blocks: a key says exactly which tokens, after which tokens, under which salt, model and adapter.

Decides when two blocks hold the same KV. Does not know where blocks lie. Invariants: a key names a full block,
never a part of one; the bytes that are hashed can be read back in one way only (lengths and token ids have a fixed
width, and so have keys), so two prefixes that differ have equal keys only if BLAKE2b (RFC 7693) with 256 bits collides.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

__all__ = ["KeyChain", "block_key", "root_key"]

KEY_BYTES = 32


def root_key(model_digest: bytes, salt: str, adapter_digest: str = "") -> bytes:
    """The parent of every first block: sequences of another model, salt or adapter start from another root.

    Without an adapter the root is the same as before there were adapters, so that blocks stored then are still found.
    """
    named = [model_digest, salt.encode("utf-8", "surrogatepass")]
    if adapter_digest:
        named.append(adapter_digest.encode())
    message = b"".join(struct.pack("<Q", len(each)) + each for each in named)
    return hashlib.blake2b(message, digest_size=KEY_BYTES, person=b"penstock root").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block of `tokens` (each in 0..2**64-1) that follows the block named `parent`."""
    message = parent + struct.pack(f"<{len(tokens)}Q", *tokens)
    return hashlib.blake2b(message, digest_size=KEY_BYTES, person=b"penstock block").digest()


class KeyChain:
    """The keys of one sequence's full blocks, each computed once as the sequence grows. Owned by its `Seq`.

    Attributes:
        root: the parent of the first block.
        block_size: tokens of a block.
        keys: one per full block, from position 0 on.
    """

    __slots__ = ("block_size", "keys", "root")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self.keys: list[bytes] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Name the blocks that `tokens`, the whole sequence so far, has filled since the last call."""
        size = self.block_size
        for start in range(len(self.keys) * size, len(tokens) - size + 1, size):
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(block_key(parent, tokens[start : start + size]))
