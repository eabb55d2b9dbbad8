"""A router's side of KV events, written from the schema that vLLM publishes and not from our publisher.

A message has three frames: topic, number (8 bytes, most significant first), MessagePack. That is an array: seconds
since 1970, events, data-parallel rank. An event is a map with `type`, or an array whose first value is its type.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import zmq

PATIENCE_MS = 20_000

ARRAY_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """The events of a payload as maps, whichever form they have."""
    seconds, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(seconds, float)
    assert seconds > 1.7e9
    assert rank == 0
    return [event if isinstance(event, dict) else _named(*event) for event in events]


def _named(kind: str, *values: Any) -> dict[str, Any]:
    return {"type": kind, **dict(zip(ARRAY_FIELDS[kind], values, strict=False))}


def number_of(frame: bytes) -> int:
    (number,) = struct.unpack(">q", frame)
    return number


class View:
    """What a router believes of one server.

    Attributes:
        blocks: block hash -> (hash of the block before it, its tokens).
        next: the number that comes next, if nothing is lost.
        lost: numbers that never came.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.salts: dict[int, list[Any]] = {}
        self.next = 0
        self.lost: list[int] = []
        self.heard: list[dict[str, Any]] = []

    def take(self, number: int, payload: bytes) -> None:
        if number < self.next:  # heard before, in a replay
            return
        self.lost += range(self.next, number)
        self.next = number + 1
        for event in events_of(payload):
            self.heard.append(event)
            getattr(self, f"_{event['type']}")(event)

    def _BlockStored(self, event: dict[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        assert len(tokens) == len(hashes) * size
        assert (event["medium"], event["lora_id"], event["lora_name"]) == ("GPU", None, None)
        assert all(isinstance(each, int) and 0 <= each < 2**64 for each in hashes)
        before = event["parent_block_hash"]
        for index, each in enumerate(hashes):
            self.blocks[each] = before, tuple(tokens[index * size : (index + 1) * size])
            before = each
        for each, keys in zip(hashes, event.get("extra_keys") or [], strict=False):
            if keys is not None:
                self.salts[each] = keys

    def _BlockRemoved(self, event: dict[str, Any]) -> None:
        assert event["medium"] == "GPU"
        for each in event["block_hashes"]:
            del self.blocks[each]

    def _AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.blocks.clear()

    def tokens_of(self, block: int) -> tuple[int, ...]:
        """All tokens up to the end of a block."""
        before, tokens = self.blocks[block]
        return tokens if before is None else self.tokens_of(before) + tokens


class Sockets:
    """Makes sockets, and closes all of them at the end."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._made: list[zmq.Socket] = []

    def socket(self, kind: int) -> zmq.Socket:
        self._made.append(self._context.socket(kind))
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.close(0)
        self._context.term()


def subscribe(context: Sockets, address: str, topic: str = "", **options: int) -> zmq.Socket:
    """A subscription; what is published before it has reached the publisher is missed."""
    reader = context.socket(zmq.SUB)
    for name, value in options.items():
        reader.setsockopt(getattr(zmq, name), value)
    reader.setsockopt(zmq.SUBSCRIBE, topic.encode())
    reader.connect(address)
    return reader


def receive(reader: zmq.Socket, milliseconds: int = PATIENCE_MS) -> tuple[bytes, int, bytes]:
    """The next message: topic, number, payload."""
    assert reader.poll(milliseconds), "nothing came"
    topic, number, payload = reader.recv_multipart()
    return topic, number_of(number), payload


def replay(context: Sockets, address: str, first: int) -> list[tuple[int, bytes]]:
    """The batches that are sent again, from number `first` on."""
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVHWM, 0)
    asker.connect(address)
    try:
        asker.send_multipart((b"", struct.pack(">q", first)))
        return [*_until_the_end(asker)]
    finally:
        asker.close(0)


def _until_the_end(asker: zmq.Socket):
    while True:
        assert asker.poll(PATIENCE_MS), "the replay has no end"
        empty, number, payload = asker.recv_multipart()
        assert empty == b""
        if number_of(number) == -1:
            assert payload == b""
            return
        yield number_of(number), payload
