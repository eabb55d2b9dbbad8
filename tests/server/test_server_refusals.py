"""Refused requests are counted, each once, by the limit that it hit."""

from __future__ import annotations

import asyncio
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from scripted_engine import ScriptedEngine, always
from server_harness import CARD, LIMITS, Served, free_port, running, start

from penstock.contract.errors import InvalidParameter, Overloaded, RefusalCause, Unavailable
from penstock.contract.limits import ServerLimits
from penstock.contract.server_config import ServerConfig
from penstock.server import create_app
from penstock.server.http.access import Access, read_keys
from penstock.server.http.lifecycle import lifecycle_of, set_lifecycle
from penstock.server.http.run import Server

KEY = "a-key-of-enough-characters"
SHOWN = re.compile(r'penstock:requests_refused_total\{.*reason="(\w+)"\} ([0-9.]+)')
MOST = 4
PATIENCE = 30


def refusals(http: httpx.Client) -> dict[str, int]:
    """The refusals counted, by cause."""
    counts = {name: int(float(count)) for name, count in SHOWN.findall(http.get("/metrics").text)}
    assert counts.keys() == {cause.value for cause in RefusalCause}, "all are shown from the beginning"
    return {name: count for name, count in counts.items() if count}


def assert_refused(http: httpx.Client, **expected: int) -> None:
    """Wait until exactly these are counted; a request is counted just after its answer's last byte."""
    end = time.monotonic() + PATIENCE
    while (counted := refusals(http)) != expected and time.monotonic() < end:
        time.sleep(0.01)
    assert counted == expected


@pytest.fixture
def fresh() -> Iterator[Served]:
    """A server that has refused nothing yet."""
    engine = ScriptedEngine()
    config = ServerConfig(port=0, max_connections=MOST)
    with (
        running(engine, config=config, access=Access(limits=ServerLimits(max_headers=20))) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        yield Served(url, engine, http)


@pytest.mark.parametrize("cause", RefusalCause)
def test_what_the_engine_refuses_is_counted_by_its_cause(fresh: Served, cause: RefusalCause):
    fresh.engine.script = always(Overloaded("Not now.", cause=cause))
    assert fresh.complete().status_code == 429
    assert_refused(fresh.http, **{cause.value: 1})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_streams_and_other_endpoints_are_counted_too(fresh: Served, stream: bool, path: str):
    fresh.engine.script = always(Overloaded("Not now.", cause=RefusalCause.WORKERS))
    body = {"messages": [{"role": "user", "content": "Hi"}], "model": "acme/tiny-1", "max_tokens": 4}
    assert fresh.http.post(path, json=body | {"stream": stream}).status_code == 429
    assert_refused(fresh.http, workers=1)


def test_a_lost_process_is_a_cause(fresh: Served):
    fresh.engine.script = always(Unavailable("Lost."))
    assert fresh.complete().status_code == 503
    assert_refused(fresh.http, process_lost=1)


def test_an_answer_of_many_prompts_is_refused_once(fresh: Served):
    fresh.engine.script = always(Overloaded("Full.", cause=RefusalCause.QUEUE_SEQUENCES))
    assert fresh.http.post("/v1/embeddings", json={"input": ["a"] * 5}).status_code == 429
    assert_refused(fresh.http, queue_sequences=1)


def test_a_wrong_request_is_no_refusal(fresh: Served):
    assert fresh.complete(temperatur=1).status_code == 400
    assert fresh.http.get("/nowhere").status_code == 404
    fresh.engine.script = always(InvalidParameter("prompt", "Wrong."))
    assert fresh.complete().status_code == 400
    assert fresh.http.get("/health/ready").status_code == 200
    assert_refused(fresh.http)


def test_bodies_and_headers_that_are_too_large_are_counted(fresh: Served):
    assert fresh.complete(prompt="x" * LIMITS.max_body_bytes).status_code == 413
    assert fresh.http.get("/v1/models", headers={f"x-{number}": "a" for number in range(30)}).status_code == 431
    assert_refused(fresh.http, body=1, headers=1)


def test_bytes_that_are_not_http_are_counted_though_no_application_hears_of_them(fresh: Served):
    with socket.create_connection(("127.0.0.1", fresh.port), timeout=PATIENCE) as talker:
        talker.sendall(b"this is not HTTP\r\n\r\n")
        assert b" 400 " in talker.recv(65536)
    assert_refused(fresh.http, headers=1)


def test_a_client_that_says_nothing_is_counted():
    app = create_app(ScriptedEngine(), CARD, LIMITS)
    told: list[RefusalCause] = []
    set_lifecycle(app, replace(lifecycle_of(app), refused=told.append))
    urls: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = Server(app, ServerConfig(port=0), urls.put, limits=ServerLimits(header_seconds=0.2))
    thread = threading.Thread(target=lambda: asyncio.run(server.listen()))
    thread.start()
    try:
        port = httpx.URL(urls.get(timeout=PATIENCE)).port
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as silent:
            assert b" 408 " in silent.recv(65536)
    finally:
        server.stop()
        thread.join(PATIENCE)
    assert told == [RefusalCause.HEADERS]


def test_connections_beyond_the_most_are_counted_answered_or_not(fresh: Served):
    with httpx.Client(base_url=fresh.url) as watching:
        assert_refused(watching)
        fresh.http.close()
        opened = []
        try:
            while "connections" not in (counts := refusals(watching)):
                assert len(opened) < 100
                opened.append(socket.create_connection(("127.0.0.1", fresh.port), timeout=PATIENCE))
                with suppress(OSError):
                    opened[-1].sendall(b"GET")
            assert counts["connections"] >= 1
        finally:
            for each in opened:
                each.close()


def test_who_has_no_key_or_comes_from_elsewhere_is_counted():
    keys = read_keys("", {"PENSTOCK_API_KEY": KEY})
    with running(ScriptedEngine(), access=Access(keys=keys)) as url, httpx.Client(base_url=url) as http:
        assert http.get("/v1/models").status_code == 401
        http.headers["authorization"] = f"Bearer {KEY}"
        assert http.post("/reset_prefix_cache").status_code == 403
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert http.post("/v1/completions", headers={"origin": "https://evil.example"}).status_code == 403
        assert_refused(http, access=4)


def test_who_comes_while_the_server_ends_is_counted():
    probe = free_port()
    engine = ScriptedEngine()
    url, server, thread = start(engine, config=ServerConfig(port=0, probe_port=probe), drain_seconds=PATIENCE)
    try:
        with httpx.Client(base_url=url) as http, httpx.Client(base_url=f"http://127.0.0.1:{probe}") as probes:
            server._lifecycle.stopping.set()
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            assert probes.get("/health/ready").status_code == 503
            assert_refused(probes, draining=1)
    finally:
        server.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_page_says_every_cause():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    table = page.partition("### Refusals")[2].partition("\n## ")[0]
    described = {
        name for row in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    assert described - {"reason"} == {cause.value for cause in RefusalCause}
