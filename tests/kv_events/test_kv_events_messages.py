"""Batches are written as the published schema says, as maps and as arrays."""

from __future__ import annotations

import msgspec
import pytest
from kv_events_reader import events_of

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared
from penstock.kv_events import block_hash, encoder

FIRST, SECOND, THIRD = (bytes([index]) * 24 + index.to_bytes(8, "big") for index in (1, 2, 3))
STORED = BlocksStored((FIRST, SECOND), None, (1, 2, 3, 4), "")


def written(*events, maps=True):
    return msgspec.msgpack.decode(encoder(2, maps=maps)(1.8e9, events))


def test_a_batch_is_an_array_of_time_events_and_rank():
    assert written(CacheCleared()) == [1.8e9, [{"type": "AllBlocksCleared"}], 0]


def test_maps_have_the_fields_by_name():
    assert written(STORED)[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [1, 2],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
    ]
    assert written(BlocksRemoved((FIRST,)))[1] == [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}]


def test_arrays_have_them_in_order_behind_the_type():
    told = written(STORED, BlocksRemoved((FIRST, SECOND)), CacheCleared(), maps=False)[1]
    assert told == [
        ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None],
        ["BlockRemoved", [1, 2], "GPU"],
        ["AllBlocksCleared"],
    ]


def test_a_block_in_the_middle_names_the_one_before():
    (event,) = events_of(encoder(2)(1.8e9, [BlocksStored((THIRD,), SECOND, (5, 6), "")]))
    assert event["parent_block_hash"] == 2


@pytest.mark.parametrize("maps", [True, False])
def test_a_salt_is_told_at_the_beginning_of_its_sequence_alone(maps):
    salted = STORED._replace(salt="s")
    later = BlocksStored((THIRD,), SECOND, (5, 6), "s")
    first, second = events_of(encoder(2, maps=maps)(1.8e9, [salted, later]))
    assert first["extra_keys"] == [["s"], None]
    assert "extra_keys" not in second
    (unsalted,) = events_of(encoder(2, maps=maps)(1.8e9, [STORED]))
    assert "extra_keys" not in unsalted


def test_a_hash_is_what_readers_make_of_the_whole_key():
    """llm-d and Dynamo take the last 8 bytes of a longer hash, most significant first."""
    key = bytes(range(32))
    assert block_hash(key) == 0x18191A1B1C1D1E1F
    assert written(BlocksRemoved((b"\xff" * 32,)))[1][0]["block_hashes"] == [2**64 - 1]


def test_blocks_of_an_adapter_carry_its_name():
    (event,) = events_of(encoder(2)(1.8e9, [BlocksStored((THIRD,), None, (5, 6), "", "poet")]))
    assert (event["lora_id"], event["lora_name"]) == (None, "poet")
    assert "extra_keys" not in event
