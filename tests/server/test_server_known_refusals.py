"""A head that was refused because the queue is full is refused again without the application, with the same answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_harness import Served, running
from test_server_refusals import assert_refused

from penstock.contract.errors import Overloaded, RefusalCause
from penstock.server.http.access import Access, read_keys
from penstock.server.http.failures import error_response
from penstock.server.http.known_refusals import MOST_HEADS, Begun, KnownRefusals, Refused

PATIENCE = 30
FULL = Overloaded("64 sequences are waiting already.", retry_after=7, cause=RefusalCause.QUEUE_SEQUENCES)
BODY = json.dumps({"prompt": "Hi", "max_tokens": 4}).encode()
VARIES = re.compile(rb"(?m)^(x-request-id|date): .*$")
DATE = ((b"date", b"Wed, 25 Nov 2026 12:00:00 GMT"),)


def request(path: str = "/v1/completions", body: bytes = BODY, *lines: str) -> bytes:
    """The bytes of a POST."""
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    """A connection to a server."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE) as sock:
        yield sock


def answer(sock: socket.socket, sent: bytes) -> bytes:
    """The whole answer to bytes."""
    sock.sendall(sent)
    got = b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    while len(body) < int(length[1]):
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was answered without the application."""
    answered: list[bytes] = []
    known = KnownRefusals.answer

    def noted(self: KnownRefusals, sent: Begun, common: object) -> bytes | None:
        found = known(self, sent, common)  # type: ignore[arg-type]
        answered.extend([found] if found else [])
        return found

    monkeypatch.setattr(KnownRefusals, "answer", noted)
    return answered


@pytest.fixture
def full() -> Iterator[Served]:
    """A server whose queue is full."""
    engine = ScriptedEngine(full={"": FULL})
    with running(engine) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        yield Served(url, engine, http)


def test_the_second_refusal_is_the_first_but_for_its_id(repeated: list[bytes], full: Served):
    with connected(full) as sock:
        first, second, third = (answer(sock, request()) for _ in range(3))
    assert repeated == [second, third]
    assert VARIES.sub(b"", first) == VARIES.sub(b"", second) == VARIES.sub(b"", third)
    assert first.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 7\r\n" in first
    assert len({re.search(rb"x-request-id: (\S+)", each)[1] for each in (first, second, third)}) == 3  # type: ignore[index]


def test_it_is_counted_as_the_first(repeated: list[bytes], full: Served):
    with connected(full) as sock:
        for _ in range(5):
            answer(sock, request())
    assert len(repeated) == 4
    assert_refused(full.http, queue_sequences=5)
    requests = full.http.get("/metrics").text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 5.0' in requests


def test_it_says_what_the_queue_is_like_by_now(repeated: list[bytes], full: Served):
    with connected(full) as sock:
        answer(sock, request())
        full.engine.full[""] = Overloaded("9 tokens.", retry_after=3, cause=RefusalCause.QUEUE_TOKENS)
        now = answer(sock, request())
    assert repeated == [now]
    assert b"\r\nretry-after: 3\r\n" in now
    assert json.loads(now.partition(b"\r\n\r\n")[2])["error"]["message"] == "9 tokens."
    assert_refused(full.http, queue_sequences=1, queue_tokens=1)


def test_where_there_is_room_the_application_answers_on_the_same_connection(repeated: list[bytes], full: Served):
    with connected(full) as sock:
        assert b" 429 " in answer(sock, request())[:20]
        assert b" 429 " in answer(sock, request())[:20]
        full.engine.full.clear()
        assert b" 200 " in answer(sock, request())[:20]
        full.engine.full[""] = FULL
        assert b" 429 " in answer(sock, request())[:20]
    assert len(repeated) == 2


@pytest.mark.parametrize(
    "other",
    [
        request("/v1/completions", BODY + b" "),
        request("/v1/completions", BODY, "X-Request-Id: mine"),
        request("/v1/completions", BODY, "Origin: http://127.0.0.1"),
        request("/v1/completions", BODY, "Host: elsewhere"),
        request("/v1/chat/completions"),
        request("/v1/messages"),
        request("/v1/models"),
    ],
    ids=["length", "id", "origin", "two-hosts", "path", "anthropic", "not-queued"],
)
def test_another_head_is_not_taken_for_it(repeated: list[bytes], full: Served, other: bytes):
    with connected(full) as sock:
        answer(sock, request())
        answer(sock, other)
    assert not repeated


@pytest.mark.parametrize("line", ["Connection: close", "Transfer-Encoding: chunked"])
def test_what_concerns_the_connection_is_left_to_the_application(repeated: list[bytes], full: Served, line: str):
    sent = request("/v1/completions", BODY, line)
    for _ in range(2):
        with connected(full) as sock:
            assert answer(sock, sent)[9:12] in (b"429", b"400")
    assert not repeated


def test_a_body_in_chunks_is_never_taken_for_the_next_request(repeated: list[bytes], full: Served):
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Transfer-Encoding: chunked"]
    head = "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()
    inside = request("/v1/models")
    with connected(full) as sock:
        for _ in range(3):
            sock.sendall(head)
            time.sleep(0.05)  # so that the head arrives alone
            assert answer(sock, b"%x\r\n%b\r\n0\r\n\r\n" % (len(inside), inside))[9:12] == b"429"
        assert answer(sock, request())[9:12] == b"429"
    assert not repeated


def test_anthropics_errors_are_left_to_who_writes_them(repeated: list[bytes], full: Served):
    with connected(full) as sock:
        for _ in range(3):
            refused = json.loads(answer(sock, request("/v1/messages")).partition(b"\r\n\r\n")[2])
            assert (refused["type"], refused["error"]["type"]) == ("error", "rate_limit_error")
    assert not repeated


def test_a_body_that_comes_in_pieces_or_brings_a_second_request(repeated: list[bytes], full: Served):
    with connected(full) as sock:
        answer(sock, request())
        sock.sendall(request()[:-5])
        full.http.get("/health")  # by its answer, the event loop has read what was sent before
        assert b" 429 " in answer(sock, request()[-5:])[:20]
        sock.sendall(request() + request())
        seen = b""
        while seen.count(b"HTTP/1.1 429 ") < 2:
            seen += sock.recv(65536)
    assert not repeated


def test_keys_are_refused_for_themselves(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one-key-of-enough-characters\nanother-key-of-enough-characters\n")
    file.chmod(0o600)
    keys = read_keys(str(file), {})
    engine = ScriptedEngine(full={keys.callers[0].name: FULL})
    with running(engine, access=Access(keys=keys)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        served = Served(url, engine, http)
        one, another, none = (
            request("/v1/completions", BODY, f"Authorization: Bearer {key}")
            for key in ("one-key-of-enough-characters", "another-key-of-enough-characters", "no-key-of-this-server")
        )
        with connected(served) as sock:
            said = [answer(sock, each)[9:12] for each in (one, one, another, none, one, another)]
    assert said == [b"429", b"429", b"200", b"401", b"429", b"200"]


BEGUN = Begun.of(request())


async def test_it_knows_few_heads_and_no_keys():
    known = KnownRefusals(lambda _: (_ for _ in ()).throw(FULL), asyncio.Event())
    said = _answered(FULL)
    for number in range(MOST_HEADS + 1):
        refused = Refused("", FULL, len(BODY), tell=lambda _id, _refusal: None)
        known.learn(Begun.of(request("/v1/completions", BODY, f"X-Api-Key: key-{number}")), said, refused, DATE)
    assert known.answer(Begun.of(request("/v1/completions", BODY, "X-Api-Key: key-0")), DATE) is None
    assert known.answer(Begun.of(request("/v1/completions", BODY, f"X-Api-Key: key-{MOST_HEADS}")), DATE) is not None
    assert b"key-" not in repr(vars(known)).encode()


async def test_while_the_server_stops_nothing_is_known():
    stopping = asyncio.Event()
    known = KnownRefusals(lambda _: (_ for _ in ()).throw(FULL), stopping)
    known.learn(BEGUN, _answered(FULL), Refused("", FULL, len(BODY), tell=lambda _id, _refusal: None), DATE)
    assert known.answer(BEGUN, DATE) is not None
    stopping.set()
    assert known.answer(BEGUN, DATE) is None


async def test_an_answer_that_was_made_another_is_not_repeated():
    known = KnownRefusals(lambda _: (_ for _ in ()).throw(FULL), asyncio.Event())
    said = _answered(FULL).replace(b"x-request-id", b"vary: Origin\r\nx-request-id")
    known.learn(BEGUN, said, Refused("", FULL, len(BODY), tell=lambda _id, _refusal: None), DATE)
    assert known.answer(BEGUN, DATE) is None


def _answered(refusal: Overloaded) -> bytes:
    """What the application answers."""
    response = error_response(refusal)
    pairs = (*DATE, *response.raw_headers, (b"x-request-id", b"req-1"))
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in pairs)
    return b"HTTP/1.1 429 Too Many Requests\r\n" + lines + b"\r\n" + bytes(response.body)
