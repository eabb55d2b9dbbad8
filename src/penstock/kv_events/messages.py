"""Writes batches of cache events as vLLM's KV events: MessagePack, `[seconds, events, data-parallel rank]`.

An event is a map with named fields (vLLM from 0.24 on), or an array of the same values behind its type (before). The
format is described by vLLM's `vllm/distributed/kv_events.py`; readers are llm-d's KV cache indexer and Dynamo's router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheEvent

__all__ = ["MEDIUM", "Encode", "block_hash", "encoder"]

MEDIUM = "GPU"
"""vLLM's name of the memory that steps read; ours lies wherever the model runs. Readers take other names for slower
memory, and weigh blocks there less."""

HASH_BYTES = 8
RANK = 0
"""There is one engine behind an address."""

Encode = Callable[[float, Sequence[CacheEvent]], bytes]
"""Writes a batch: seconds since 1970, and its events."""


def block_hash(key: bytes) -> int:
    """What readers know a block by: the last 64 bits of its key, the most significant byte first.

    The oldest readers take nothing but integers, and newer ones make this very number of a longer hash.
    """
    return int.from_bytes(key[-HASH_BYTES:], "big")


def encoder(block_size: int, *, maps: bool = True) -> Encode:
    """What writes batches of blocks of `block_size` tokens, with events as maps, or as arrays."""
    pack = msgspec.msgpack.Encoder().encode

    def encode(seconds: float, events: Sequence[CacheEvent]) -> bytes:
        described = [_fields(event, block_size) for event in events]
        return pack((seconds, described if maps else [tuple(each.values()) for each in described], RANK))

    return encode


def _fields(event: CacheEvent, block_size: int) -> dict[str, object]:
    """An event's fields, in the order in which arrays have them."""
    match event:
        case BlocksStored():
            return _stored(event, block_size)
        case BlocksRemoved(keys):
            return {"type": "BlockRemoved", "block_hashes": [block_hash(key) for key in keys], "medium": MEDIUM}
        case _:
            return {"type": "AllBlocksCleared"}


def _stored(event: BlocksStored, block_size: int) -> dict[str, object]:
    fields: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [block_hash(key) for key in event.keys],
        "parent_block_hash": None if event.parent is None else block_hash(event.parent),
        "token_ids": event.tokens,
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": event.adapter or None,
    }
    if event.salt and event.parent is None:  # vLLM has it at a sequence's first block, on which all others depend
        fields["extra_keys"] = [(event.salt,), *[None] * (len(event.keys) - 1)]
    return fields
