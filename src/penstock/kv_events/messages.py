"""Encodes batches of cache events as vLLM's KV events: MessagePack, `[seconds, events, data-parallel rank]`.

An event is a map with named fields (vLLM from 0.24 on), or an array of its type and the same values (before). vLLM's
`vllm/distributed/kv_events.py` describes the format; llm-d's KV cache indexer and Dynamo's router read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheEvent

__all__ = ["MEDIUM", "Encode", "block_hash", "encoder"]

MEDIUM = "GPU"
"""vLLM's name for the memory that steps read; Penstock uses it wherever the model runs. Readers take any other name to
mean slower memory, and give blocks there less weight."""

HASH_BYTES = 8
RANK = 0
"""The data-parallel rank: there is one engine behind an address."""

Encode = Callable[[float, Sequence[CacheEvent]], bytes]
"""Encodes a batch, given as seconds since 1970 and its events."""


def block_hash(key: bytes) -> int:
    """The number by which readers know a block: the last 64 bits of its key, most significant byte first.

    The oldest readers accept only integers, and newer ones reduce a longer hash to this same number.
    """
    return int.from_bytes(key[-HASH_BYTES:], "big")


def encoder(block_size: int, *, maps: bool = True) -> Encode:
    """Make the function that encodes batches for blocks of `block_size` tokens, with events as maps or as arrays."""
    pack = msgspec.msgpack.Encoder().encode

    def encode(seconds: float, events: Sequence[CacheEvent]) -> bytes:
        described = [_fields(event, block_size) for event in events]
        return pack((seconds, described if maps else [tuple(each.values()) for each in described], RANK))

    return encode


def _fields(event: CacheEvent, block_size: int) -> dict[str, object]:
    """An event's fields, in the order of the array form."""
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
    if event.salt and event.parent is None:  # vLLM gives it to a sequence's first block, on which all others depend
        fields["extra_keys"] = [(event.salt,), *[None] * (len(event.keys) - 1)]
    return fields
