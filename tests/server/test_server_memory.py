"""How much clients may make the server keep at once: requests, unread answers, stores; and how it is reported."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from resuming import CHAT, blocks, id_of, resume, told
from scripted_engine import HELLO, ScriptedEngine, Until, always, delta, finished, stop
from server_harness import running

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, Overloaded, ReaderTooSlow
from penstock.contract.limits import DEFAULT_SERVER_LIMITS, RequestLimits
from penstock.contract.memory_budget import DEFAULT_BYTES, STREAM_BYTES, MemoryBudget
from penstock.server.http import held_requests
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.caller import Caller
from penstock.server.http.failures import HttpRefusal
from penstock.server.http.held_requests import FREE_BYTES, HeldBytes

KIB = 1024
ROOM = 300 * KIB
LARGE, SMALL = "x" * 250 * KIB, "x" * 40 * KIB
JSON = {"content-type": "application/json"}
KEYS = ("a" * 16, "b" * 16)


@contextmanager
def tight(engine: ScriptedEngine, keys: tuple[str, ...] = ()) -> Iterator[httpx.Client]:
    """A server that has `ROOM` for requests beyond their first bytes."""
    callers = tuple(Caller(hashlib.sha256(key.encode()).digest(), admin=False) for key in keys)
    options = {"access": Access(keys=ApiKeys(callers)), "limits": RequestLimits(max_prompt_chars_per_token=1 << 20)}
    with (
        running(engine, memory=MemoryBudget(4 * ROOM), **options) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        yield http


@contextmanager
def held(engine: ScriptedEngine, http: httpx.Client, text: str = LARGE, **headers: str) -> Iterator[None]:
    """A request with this text is being answered, until the block ends."""
    done = threading.Event()
    engine.script = always(delta("a"), Until(done), stop(), finished())
    with http.stream("POST", CHAT, json=chat(text, stream=True), headers=headers) as answer:
        assert answer.status_code == 200
        engine.script = HELLO
        yield
        done.set()


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def pieces(text: str) -> Iterator[bytes]:
    body = json.dumps(chat(text)).encode()
    yield from (body[at : at + 1000] for at in range(0, len(body), 1000))


def kept(http: httpx.Client, store: str) -> float:
    """Bytes of a store, as the metrics say."""
    found = re.search(rf'^penstock:memory_bytes{{.*store="{store}".*}} (\S+)$', http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_large_requests_are_refused_where_others_are_held_and_small_ones_are_not():
    engine = ScriptedEngine()
    with tight(engine) as http:
        with held(engine, http):
            assert 150 * KIB < kept(http, "requests") <= ROOM
            for sent in ({"json": chat(LARGE)}, {"content": pieces(LARGE), "headers": JSON}):
                refused = http.post(CHAT, **sent)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.headers["connection"] == "close"
                assert "large requests" in refused.json()["error"]["message"]
            for _ in range(10):
                assert http.post(CHAT, json=chat(SMALL)).status_code == 200
        engine.wait_until(lambda: kept(http, "requests") == 0, 30)
        assert http.post(CHAT, json=chat(LARGE)).status_code == 200
        assert http.post(CHAT, content=pieces(LARGE), headers=JSON).status_code == 200
        engine.wait_until(lambda: kept(http, "requests") == 0, 30)


def test_a_body_is_refused_before_it_was_sent_where_it_says_how_long_it_is():
    engine = ScriptedEngine()
    with tight(engine) as http, held(engine, http):
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(LARGE)}"
        )
        with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=30) as connection:
            connection.sendall(f"{head}\r\n\r\n{{".encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 429 ")


def test_values_are_weighed_and_not_their_letters():
    engine = ScriptedEngine()
    with tight(engine) as http:
        refused = http.post("/v1/completions", json={"prompt": "a", "stop": [[]] * 20_000})
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "request_too_large"
        assert http.post("/v1/completions", json={"prompt": "a", "stop": [[]] * 200}).status_code == 400
        assert kept(http, "requests") == 0


def test_one_key_leaves_room_to_others():
    engine = ScriptedEngine()
    one, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    half = "x" * (180 * KIB)
    with tight(engine, KEYS) as http, held(engine, http, half, **one):
        assert http.post(CHAT, json=chat(half), headers=one).status_code == 429
        assert http.post(CHAT, json=chat(half), headers=other).status_code == 200


async def test_what_is_held_is_counted_by_caller_and_given_back(monkeypatch):
    monkeypatch.setattr(held_requests, "REST_SECONDS", 0.0)
    rested = threading.Event()
    room = HeldBytes(1000, 600, rested.set)
    room.check("a", FREE_BYTES + 600)
    room.hold("a", 600)
    room.check("a", FREE_BYTES + 600, held=600)
    room.check("a", FREE_BYTES)
    with pytest.raises(Overloaded):
        room.check("a", FREE_BYTES + 1)
    room.hold("b", 300)
    with pytest.raises(Overloaded):
        room.check("c", FREE_BYTES + 101)
    with pytest.raises(HttpRefusal, match="too many values"):
        room.check("c", FREE_BYTES + 601)
    room.hold("a", -600)
    room.hold("b", -300)
    room.hold("a", 0)  # a small request has ended
    assert room.bytes == 0
    assert not room._callers
    assert await asyncio.to_thread(rested.wait, 30)


def test_a_stream_that_was_read_too_slowly_says_so_and_its_rest_can_be_had(served):
    body = chat("Hi", stream=True)
    served.engine.script = HELLO
    whole = told(CHAT, served.http.post(CHAT, json=body).content)
    served.engine.script = always(delta("Hel"), ReaderTooSlow())
    begun = blocks(served.http.post(CHAT, json=body).content)
    assert json.loads(begun[-2].splitlines()[0].removeprefix(b"data: "))["error"]["code"] == "reader_too_slow"
    served.engine.script = HELLO
    rest = resume(served.http, CHAT, body, id_of(begun[-1]))
    assert told(CHAT, b"".join(begun[:-2]) + rest.content) == whole


def test_stores_are_counted_and_give_back():
    engine = ScriptedEngine()
    with running(engine, memory=MemoryBudget()) as url, httpx.Client(base_url=url, timeout=30) as http:
        stores = ("stored_responses", "stored_completions", "resumable_streams")
        assert [kept(http, store) for store in stores] == [0, 0, 0]
        response = http.post("/v1/responses", json={"input": "Hi"}).json()["id"]
        completion = http.post(CHAT, json=chat("Hi", store=True)).json()["id"]
        assert all(kept(http, store) > 100 for store in stores[:2])
        http.post(CHAT, json=chat("Hi", stream=True))
        assert kept(http, "resumable_streams") == STREAM_BYTES
        http.delete(f"/v1/responses/{response}")
        http.delete(f"{CHAT}/{completion}")
        assert [kept(http, store) for store in stores[:2]] == [0, 0]
        assert "penstock:memory_limit_bytes{" in http.get("/metrics").text


@pytest.mark.parametrize("limit", [64 << 20, DEFAULT_BYTES, 3 << 30])
def test_shares_are_no_more_than_there_is(limit):
    budget = MemoryBudget(limit)
    caches = (2 * budget.stored, budget.grammars, budget.recent_answers, budget.streams)
    shares = (budget.requests, budget.outputs, *caches)
    assert min(shares) > 0
    assert sum(shares) <= budget.limit
    limits = budget.applied(DEFAULT_SERVER_LIMITS)
    assert limits.max_stored_bytes == budget.stored
    assert limits.max_resumable_streams * STREAM_BYTES <= budget.streams


def test_without_a_figure_the_stores_have_what_they_had_before_there_was_one():
    limits = MemoryBudget().applied(DEFAULT_SERVER_LIMITS)
    assert limits == DEFAULT_SERVER_LIMITS


@pytest.mark.parametrize("limit", [-1, 1, (64 << 20) - 1])
def test_a_limit_too_small_to_serve_with_is_refused(limit):
    with pytest.raises(ConfigError, match="memory_limit: must be 0 or at least 64MiB"):
        EngineConfig(memory_limit=limit)
    assert EngineConfig(memory_limit=64 << 20).memory_limit == 64 << 20
