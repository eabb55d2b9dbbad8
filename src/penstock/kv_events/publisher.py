"""Sends batches of KV events from its own thread, and sends them again to readers that missed some.

The engine's thread appends a batch to a bounded queue and rings a bell; it never waits. The publisher's thread encodes
the batch and gives it to ZeroMQ, which does not wait for readers either: a reader that is too slow loses batches. A
batch gets its number before it is queued or dropped, so a reader sees every loss as a gap in the numbers, and can ask
for the missing batches while they are kept (`_answer`).

On the wire (vLLM's protocol): a PUB socket sends `[topic, number, payload]`, the number in 8 bytes, most significant
first. A ROUTER socket takes the first wanted number in the same form. It answers with `[number, payload]` for each
batch that is still kept, and finally with number -1 and an empty payload. Batch 0 and the last batch say that the cache
is empty: a new engine has forgotten what its predecessor held.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import zmq

from penstock.contract.cache_events import CacheCleared, CacheEvent, EventCounts
from penstock.contract.errors import ConfigError
from penstock.kv_events.messages import Encode

__all__ = ["KvEventPublisher"]

log = logging.getLogger(__name__)

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)

_CLOSE_SECONDS = 2.0
"""How long closing may take; the thread is a daemon, so a stuck reader cannot keep the process alive."""

_LINGER_MS = 200
"""How long ZeroMQ may take to send the last batches when the sockets are closed."""

_MOST_REQUEST_BYTES = 1024
"""Most bytes of a reader's message, which is a topic, or a number and the reader's address."""

_RING = b"\0"
_MOST_RINGS = 4096


class _Batch(NamedTuple):
    number: int
    seconds: float
    events: Sequence[CacheEvent]


class KvEventPublisher:
    """Publishes KV events as the module's docstring says. Only the engine's thread may call `publish`.

    Args:
        address: address of the PUB socket, for example tcp://127.0.0.1:5557; port 0 takes a free one.
        replay_address: address of the ROUTER socket; "" for none.
        topic: topic of all messages.
        buffer: number of batches kept for replay; at most as many wait for the thread, or for a slow reader.
        encode: encodes a batch.

    Raises:
        ConfigError: the publisher cannot listen on an address.

    Attributes:
        address: address of the PUB socket, with its actual port.
        replay_address: address of the ROUTER socket, with its actual port; "" for none.
    """

    def __init__(self, address: str, replay_address: str, topic: str, buffer: int, encode: Encode) -> None:
        self._topic = topic.encode()
        self._buffer = buffer
        self._encode = encode
        self._waiting: deque[_Batch] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._number = 0
        self._dropped = 0
        self._closing = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._context = zmq.Context()
        try:
            self._pub = self._listen(zmq.PUB, "kv_events", address)
            self._router = self._listen(zmq.ROUTER, "kv_events_replay", replay_address) if replay_address else None
        except ConfigError:
            self._free()
            raise
        self.address = _bound(self._pub)
        self.replay_address = "" if self._router is None else _bound(self._router)
        self._thread = threading.Thread(target=self._work, name="penstock-kv-events", daemon=True)
        self._thread.start()
        self.publish((CacheCleared(),))

    @property
    def counts(self) -> EventCounts:
        """Numbers of batches published and dropped since the start."""
        return EventCounts(self._number - self._dropped, self._dropped)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queue a batch to be sent; drop it if `buffer` batches are waiting already."""
        number = self._number
        self._number += 1
        if len(self._waiting) >= self._buffer:
            self._dropped += 1
            return
        self._waiting.append(_Batch(number, time.time(), events))
        self._ring()

    def close(self) -> None:
        """Tell readers that the cache is empty, and stop. `publish` must not be called afterwards."""
        self.publish((CacheCleared(),))
        self._closing = True
        self._ring()
        self._thread.join(_CLOSE_SECONDS)

    def _listen(self, kind: int, option: str, address: str) -> zmq.Socket[bytes]:
        """A socket that listens on an address; at most `buffer + 1` messages wait in it for a reader."""
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.LINGER, _LINGER_MS)
        bound.setsockopt(zmq.SNDHWM, self._buffer + 1)
        bound.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        bound.setsockopt(zmq.IPV6, "[" in address)
        if kind == zmq.ROUTER:
            bound.setsockopt(zmq.ROUTER_MANDATORY, True)  # sending fails if the reader has left or is full
        try:
            bound.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(option, f"cannot listen on {address}: {error.strerror}") from error
        return bound

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # so many rings are unheard that the thread will wake anyway
            self._bell.send(_RING)

    # ---- the thread

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        closing = False
        while not closing:
            ready = dict(poller.poll())
            if self._ear.fileno() in ready:
                self._ear.recv(_MOST_RINGS)
            closing = self._closing  # read before the queue is emptied, so that all earlier batches are sent
            self._send_waiting()
            if self._router is not None and self._router in ready:
                self._answer(self._router)
        self._free()

    def _send_waiting(self) -> None:
        while self._waiting:
            batch = self._waiting.popleft()
            try:
                payload = self._encode(batch.seconds, batch.events)
                self._pub.send_multipart((self._topic, _spelled(batch.number), payload), zmq.NOBLOCK)
            except Exception:  # the reader sees that the number is missing
                log.exception("KV events %d were not sent", batch.number)
                continue
            self._kept.append((batch.number, payload))

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        """Send one reader the batches that it asks for; stop if it has left, or has not read its earlier answers."""
        *envelope, wanted = router.recv_multipart()
        first = int.from_bytes(wanted, "big") if len(wanted) == NUMBER_BYTES else self._number  # else no batch
        try:
            for number, payload in self._kept:
                if number >= first:
                    router.send_multipart((*envelope, _spelled(number), payload), zmq.NOBLOCK)
            router.send_multipart((*envelope, END, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("a replay of KV events was broken off: %s", error.strerror)

    def _free(self) -> None:
        self._bell.close()
        self._ear.close()
        self._context.destroy(_LINGER_MS)


def _bound(listening: zmq.Socket[bytes]) -> str:
    """The address that a socket listens on, with its actual port."""
    address: bytes = listening.getsockopt(zmq.LAST_ENDPOINT)
    return address.rstrip(b"\0").decode()


def _spelled(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
