"""A full queue refuses requests before their bodies are parsed: which, how, and what becomes of the connection."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_harness import Served, running
from test_server_refusals import assert_refused

from penstock.contract.errors import Overloaded, RefusalCause
from penstock.server.http.access import Access, read_keys

PATIENCE = 30
FULL = Overloaded("64 sequences are waiting already.", retry_after=7, cause=RefusalCause.QUEUE_SEQUENCES)
NO_JSON = {"content": b"{this is no JSON", "headers": {"content-type": "application/json"}}
QUEUED = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/generate",
]


@pytest.fixture
def full() -> Iterator[Served]:
    """A server whose queue is full for callers without a key."""
    engine = ScriptedEngine(full={"": FULL})
    with running(engine) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        yield Served(url, engine, http)


@pytest.mark.parametrize("path", QUEUED)
def test_what_would_wait_is_refused_unread(full: Served, path: str):
    refused = full.http.post(path, **NO_JSON)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "7"
    assert refused.json()["error"]["message"] == FULL.message
    assert not full.engine.requests
    assert_refused(full.http, queue_sequences=1)
    requests = full.http.get("/metrics").text
    assert f'http_requests_total{{handler="{path}",method="POST",status="4xx"}} 1.0' in requests


def test_what_does_not_wait_is_never_refused(full: Served):
    for path in ("/v1/models", "/metrics", "/health/live", "/health/ready", "/health", "/"):
        assert full.http.get(path).status_code == 200, path
    assert full.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert full.http.post("/abort_requests", json={"request_ids": ["a"]}).status_code < 429
    assert_refused(full.http)


def test_the_rest_of_a_stream_is_left_to_the_engine(full: Served):
    full.engine.full.clear()
    begun = full.complete(stream=True, max_tokens=4)
    last = next(line.removeprefix("id: ") for line in begun.text.splitlines() if line.startswith("id: "))
    full.engine.full[""] = FULL
    body = {"prompt": "Hi", "stream": True, "max_tokens": 4}
    rest = full.http.post("/v1/completions", json=body, headers={"Last-Event-ID": last})
    assert rest.status_code == 200
    assert rest.text in begun.text
    assert full.http.post("/v1/completions", json=body).status_code == 429


def test_anthropics_clients_read_anthropics_errors(full: Served):
    refused = full.http.post("/v1/messages", json={}).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "rate_limit_error")


def test_the_connection_goes_on_after_a_refusal(full: Served):
    connection = http.client.HTTPConnection("127.0.0.1", full.port, timeout=PATIENCE)
    body = json.dumps({"prompt": "x" * 20_000})
    for _ in range(3):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        refused = connection.getresponse()
        assert (refused.status, refused.getheader("connection")) == (429, None)
        refused.read()
        sock = connection.sock
        assert sock is not None, "the server did not close it"
    full.engine.full.clear()
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "Hi"}), {"content-type": "application/json"})
    assert connection.getresponse().status == 200
    assert connection.sock is sock
    connection.close()


def test_a_body_too_large_to_be_read_to_its_end_ends_the_connection_and_its_sender_reads_why(full: Served):
    with httpx.Client(base_url=full.url, timeout=PATIENCE) as client:
        refused = client.post("/v1/completions", content=iter([os.urandom(30_000)] * 5))
    assert refused.status_code == 429
    assert refused.headers["connection"] == "close"


def test_a_tenant_is_refused_for_its_own_part_alone(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one-key-of-enough-characters\nanother-key-of-enough-characters\n")
    file.chmod(0o600)
    keys = read_keys(str(file), {})
    floods, other = (caller.name for caller in keys.callers)
    engine = ScriptedEngine(full={floods: FULL})
    with running(engine, access=Access(keys=keys)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        served = Served(url, engine, http)
        http.headers["authorization"] = "Bearer one-key-of-enough-characters"
        assert served.complete().status_code == 429
        http.headers["authorization"] = "Bearer another-key-of-enough-characters"
        assert served.complete().status_code == 200
        assert served.request.tenant == other
        http.headers["authorization"] = "Bearer no-key-at-all-of-any-length"
        assert served.complete().status_code == 401
