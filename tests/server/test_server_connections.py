"""What one connection may cost: silence, stalled reading, and their number."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from scripted_engine import ScriptedEngine, always, delta, finished, stop
from server_harness import running

from penstock.contract.limits import ServerLimits
from penstock.contract.server_config import ServerConfig

LIMITS = ServerLimits(header_seconds=0.5, write_seconds=1.0)
MOST = 4


@pytest.fixture
def bounded() -> Iterator[tuple[int, ScriptedEngine]]:
    engine = ScriptedEngine()
    with running(engine, server_limits=LIMITS, config=ServerConfig(port=0, max_connections=MOST)) as url:
        yield httpx.URL(url).port, engine


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(5)
    answer = b""
    while piece := connection.recv(65536):
        answer += piece
    return answer


def read_answer(connection: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"}]}") and (piece := connection.recv(65536)):
        answer += piece
    return answer


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"])
def test_headers_that_do_not_come_end_the_connection(bounded, sent):
    port, _ = bounded
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        answer = read_all(connection)
        assert 0.4 < time.monotonic() - began < 4
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    assert b"\r\nx-request-id: req-" in answer


def test_headers_that_drip_do_not_win_time(bounded):
    port, _ = bounded
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.monotonic()
        answer = b""
        while time.monotonic() - began < 5 and not answer:
            try:
                connection.sendall(b"G")
                connection.settimeout(0.05)
                answer = connection.recv(1000)
            except TimeoutError:
                continue
        assert time.monotonic() - began < 4
    assert b"408" in answer


def test_a_second_request_on_a_connection_has_its_own_time(bounded):
    port, _ = bounded
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(5)
        connection.sendall(request)
        assert read_answer(connection).startswith(b"HTTP/1.1 200")
        time.sleep(0.8)  # idle, but not in the middle of a request: the keep-alive time counts, not the headers'
        connection.sendall(request)
        assert read_answer(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(request[:10])
        assert b"408" in read_all(connection)


def test_what_is_no_http_gets_an_error_object(bounded):
    port, _ = bounded
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid_http"' in answer


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + SMUGGLED,
        SMUGGLED.replace(b"\r\n", b"\n"),
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\nX-Other: a\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\n\nGET / HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Folded: a\r\n b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\tb\r\n\r\n",
    ],
)
def test_what_two_readers_could_take_for_different_requests_is_refused(bounded, sent):
    port, _ = bounded
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"code":"invalid_http"' in answer


def test_a_head_may_come_in_pieces(bounded):
    port, _ = bounded
    whole = SMUGGLED
    for cut in range(1, len(whole)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(whole[:cut])
            connection.sendall(whole[cut:])
            assert read_answer(connection).startswith(b"HTTP/1.1 200"), cut


def test_a_client_that_does_not_read_is_cut_off_and_its_work_ended(bounded):
    port, engine = bounded
    engine.script = always(*[delta("x" * 60_000) for _ in range(1000)], stop(), finished())
    body = b'{"prompt":"a","stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        engine.wait_until(lambda: len(engine.left) == 1, seconds=10)
        assert engine.yielded < 1000
    assert not engine.live


def test_a_client_that_reads_slowly_is_not_cut_off(bounded):
    port, engine = bounded
    engine.script = always(*[delta("x" * 60_000) for _ in range(8)], stop(), finished())
    with httpx.stream(
        "POST", f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "stream": True}, timeout=5
    ) as response:
        size = 0
        for piece in response.iter_raw(65536):
            size += len(piece)
            time.sleep(0.1)
    assert size > 480_000
    assert engine.left == []


def test_there_is_a_most_of_connections():
    engine = ScriptedEngine()
    with running(engine, config=ServerConfig(port=0, max_connections=MOST)) as url:
        held = [socket.create_connection(("127.0.0.1", httpx.URL(url).port)) for _ in range(MOST)]
        try:
            answer = httpx.get(f"{url}/health/live")
        finally:
            for connection in held:
                connection.close()
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "overloaded"
        engine.wait_until(lambda: httpx.get(f"{url}/health/live").status_code == 200)
