"""The publisher over real sockets: numbers, replay, what is lost and how it shows, and that it waits for no reader."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from kv_events_reader import Sockets, View, events_of, receive, replay, subscribe

from penstock.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, EventCounts
from penstock.contract.errors import ConfigError
from penstock.kv_events import KvEventPublisher, encoder

ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture
def context() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


@contextmanager
def publishing(*, topic="", buffer=1000, encode=None, address=ANY_PORT) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(address, ANY_PORT, topic, buffer, encode or encoder(1))
    try:
        yield publisher
    finally:
        publisher.close()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int) -> tuple[BlocksStored]:
    return (BlocksStored((key(number),), None, (number,), ""),)


def listening(context, publisher, **options) -> zmq.Socket:
    """A subscription that works: it has received something."""
    reader = subscribe(context, publisher.address, **options)
    while not reader.poll(20):
        publisher.publish((CacheCleared(),))
    reader.recv_multipart()
    while reader.poll(50):
        reader.recv_multipart()
    return reader


def idle(publisher) -> None:
    """Wait until no batch waits for the thread."""
    until = time.monotonic() + 20
    while publisher._waiting:
        assert time.monotonic() < until
        time.sleep(0.001)


def settled(publisher, context) -> int:
    """The number of the last batch, once it is kept for replay."""
    last = publisher.counts.published + publisher.counts.dropped - 1
    until = time.monotonic() + 20
    while not any(number == last for number, _ in replay(context, publisher.replay_address, last)):
        assert time.monotonic() < until
    return last


def test_messages_have_a_topic_a_number_and_a_payload(context):
    with publishing(topic="kv@10.0.0.1:8000@tiny") as publisher:
        reader = listening(context, publisher, topic="kv@")
        publisher.publish(stored(7))
        publisher.publish((BlocksRemoved((key(7),)),))
        (topic, first, payload), (_, second, _) = receive(reader), receive(reader)
        assert topic == b"kv@10.0.0.1:8000@tiny"
        assert second == first + 1
        assert events_of(payload)[0]["token_ids"] == [7]


def test_whoever_wants_another_topic_hears_nothing(context):
    with publishing(topic="kv@one") as publisher:
        reader = listening(context, publisher, topic="kv@one")
        other = subscribe(context, publisher.address, "kv@two")
        publisher.publish(stored(1))
        receive(reader)
        assert not other.poll(200)


def test_a_replay_brings_everything_from_a_number_on_and_then_ends(context):
    with publishing() as publisher:
        for number in range(1, 6):
            publisher.publish(stored(number))
        assert settled(publisher, context) == 5
        assert [number for number, _ in replay(context, publisher.replay_address, 0)] == [0, 1, 2, 3, 4, 5]
        assert [number for number, _ in replay(context, publisher.replay_address, 4)] == [4, 5]
        assert replay(context, publisher.replay_address, 6) == []
        view = View()
        for number, payload in replay(context, publisher.replay_address, 0):
            view.take(number, payload)
        assert view.heard[0] == {"type": "AllBlocksCleared"}, "a new engine holds nothing"
        assert view.blocks == {number: (None, (number,)) for number in range(1, 6)}


def test_no_more_is_kept_than_the_buffer_holds(context):
    with publishing(buffer=3) as publisher:
        for number in range(1, 10):
            publisher.publish(stored(number))
            settled(publisher, context)
        assert [number for number, _ in replay(context, publisher.replay_address, 0)] == [7, 8, 9]


def test_what_is_no_number_is_answered_with_the_end(context):
    with publishing() as publisher:
        asker = context.socket(zmq.DEALER)
        asker.connect(publisher.replay_address)
        asker.send_multipart((b"", b"first"))
        assert asker.poll(20_000)
        assert asker.recv_multipart() == [b"", b"\xff" * 8, b""]


def test_a_request_socket_gets_the_first_batch(context):
    """A REQ socket takes only one of several answers; vLLM's examples use such a socket."""
    with publishing() as publisher:
        settled(publisher, context)
        asker = context.socket(zmq.REQ)
        asker.connect(publisher.replay_address)
        asker.send((0).to_bytes(8, "big"))
        assert asker.poll(20_000)
        number, payload = asker.recv_multipart()
        assert (number, events_of(payload)) == (bytes(8), [{"type": "AllBlocksCleared"}])


def test_what_cannot_be_sent_is_counted_and_is_a_gap(context):
    go_on, write = threading.Event(), encoder(1)

    def slowly(seconds, events):
        go_on.wait(20)
        return write(seconds, events)

    with publishing(buffer=2, encode=slowly) as publisher:
        for number in range(1, 8):
            publisher.publish(stored(number))
        counts = publisher.counts
        go_on.set()
        assert counts.published + counts.dropped == 8, "with the batch that says that the cache is empty"
        assert counts.dropped in (5, 6), "two wait, and one may be with the thread"
        idle(publisher)
        publisher.publish(stored(8))
        assert settled(publisher, context) == 8
        view = View()
        for number, payload in replay(context, publisher.replay_address, 0):
            view.take(number, payload)
        assert view.next == 9
        assert set(view.lost) >= set(range(8 - counts.dropped, 8)), "and what the buffer has forgotten"


def test_a_batch_that_cannot_be_written_is_a_gap_and_the_next_one_comes(context, caplog):
    write = encoder(1)

    def picky(seconds, events):
        if events == stored(1):
            raise ValueError("planted")
        return write(seconds, events)

    with caplog.at_level(logging.ERROR), publishing(encode=picky) as publisher:
        publisher.publish(stored(1))
        publisher.publish(stored(2))
        settled(publisher, context)
        assert [number for number, _ in replay(context, publisher.replay_address, 0)] == [0, 2]
    assert "KV events 1 were not sent" in caplog.text


def test_a_subscriber_that_reads_nothing_delays_nobody(context):
    with publishing(buffer=100) as publisher:
        stuck = listening(context, publisher, RCVHWM=1)
        reader = listening(context, publisher, RCVHWM=0)
        longest, view = 0.0, View()
        first = publisher.counts.published
        view.next = first
        heavy = BlocksStored(tuple(key(index) for index in range(2000)), None, tuple(range(2000)), "")
        for _ in range(500):  # 15 MB, which no socket buffer holds
            began = time.perf_counter()
            publisher.publish((heavy,))
            longest = max(longest, time.perf_counter() - began)
            _, number, payload = receive(reader)
            view.take(number, payload)
        assert longest < 1.0
        assert view.next == first + 500
        assert view.lost == []
        assert publisher.counts == EventCounts(first + 500, 0)
        assert stuck.poll(0), "it has something to read, and did not"


def test_whoever_asks_and_does_not_read_delays_nobody(context):
    with publishing(buffer=200) as publisher:
        heavy = BlocksStored(tuple(key(index) for index in range(2000)), None, tuple(range(2000)), "")
        for _ in range(150):
            publisher.publish((heavy,))
            idle(publisher)
        last = settled(publisher, context)
        asker = context.socket(zmq.DEALER)
        asker.setsockopt(zmq.RCVHWM, 1)
        asker.connect(publisher.replay_address)
        for _ in range(20):
            asker.send_multipart((b"", bytes(8)))
        assert [number for number, _ in replay(context, publisher.replay_address, last)] == [last]
        publisher.publish(stored(1))
        assert settled(publisher, context) == last + 1


def test_the_end_says_that_nothing_is_held_any_more(context):
    with publishing() as publisher:
        reader = listening(context, publisher)
        publisher.publish(stored(1))
        receive(reader)
    assert events_of(receive(reader)[2]) == [{"type": "AllBlocksCleared"}]


def test_ipc_is_an_address_too(context, tmp_path):
    with publishing(address=f"ipc://{tmp_path}/kv") as publisher:
        reader = listening(context, publisher)
        publisher.publish(stored(1))
        assert events_of(receive(reader)[2])[0]["block_hashes"] == [1]


def test_an_address_in_use_is_an_error_of_the_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^kv_events: cannot listen on {address}: "):
            KvEventPublisher(address, "", "", 10, encoder(1))
        with pytest.raises(ConfigError, match=r"^kv_events_replay: cannot listen on "):
            KvEventPublisher(ANY_PORT, address, "", 10, encoder(1))


def test_an_address_of_another_machine_is_an_error_of_the_option():
    with pytest.raises(ConfigError, match=r"^kv_events: cannot listen on tcp://192\.0\.2\.1:5557: "):
        KvEventPublisher("tcp://192.0.2.1:5557", "", "", 10, encoder(1))


def test_threads_and_sockets_end_with_it():
    before = threading.active_count()
    with publishing() as publisher:
        assert publisher.address.startswith("tcp://127.0.0.1:")
    assert threading.active_count() == before
