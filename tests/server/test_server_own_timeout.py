"""The timeout that a request sets for itself: `x-request-timeout`."""

from __future__ import annotations

import httpx
import pytest
from scripted_engine import ScriptedEngine, Wait, always, delta, finished, stop
from server_harness import Served, running
from sse_reader import read_events

from penstock.contract.errors import Overloaded
from penstock.contract.limits import DEFAULT_SERVER_LIMITS
from penstock.server.http.access import Access

PATIENCE = 30
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGES = CHAT | {"model": "acme/tiny-1", "max_tokens": 4}
GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi", "model": "acme/tiny-1"},
    "/v1/messages": MESSAGES,
    "/generate": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


def within(seconds: str) -> dict[str, str]:
    return {"x-request-timeout": seconds}


@pytest.mark.parametrize("path", GENERATING)
def test_every_endpoint_that_computes_ends_a_request_in_its_own_time(served: Served, path: str):
    served.engine.script = always(Wait())
    answer = served.http.post(path, json=GENERATING[path], headers=within("0.05"))
    assert answer.status_code == 504
    assert "ended after 0.05 seconds" in answer.json()["error"]["message"]
    served.engine.wait_until(lambda: not served.engine.live, PATIENCE)
    assert {each.max_seconds for each in served.engine.requests} == {0.05}


def test_a_stream_ends_with_the_servers_error_and_its_work_is_over(served: Served):
    served.engine.script = always(delta("x"), Wait())
    stream = served.http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=within("1"))
    assert stream.status_code == 200
    assert "request_timeout" in stream.text
    assert read_events(stream.content)[-1].data == "[DONE]"
    served.engine.wait_until(lambda: not served.engine.live, PATIENCE)
    assert len(served.engine.left) == 1


def test_a_background_response_has_it_too(served: Served):
    served.engine.script = always(Wait())
    begun = served.http.post("/v1/responses", json={"input": "Hi", "background": True}, headers=within("0.05"))
    path = f"/v1/responses/{begun.json()['id']}"
    served.engine.wait_until(lambda: served.http.get(path).json()["status"] == "failed", PATIENCE)
    assert "ended after 0.05 seconds" in served.http.get(path).json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "servers", "seconds"),
    [("20", 600, 20), ("100.5", 600, 100.5), ("900", 600, 600), ("900", 0, 900), (None, 600, 0), (None, 0, 0)],
)
def test_it_is_at_most_the_servers(asked: str | None, servers: float, seconds: float):
    engine = ScriptedEngine()
    with running(engine, access=Access(request_seconds=servers)) as url:
        headers = {} if asked is None else within(asked)
        assert httpx.post(url + "/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert engine.requests[0].max_seconds == seconds


@pytest.mark.parametrize(
    "value", ["0", "0.0", "-1", "", "soon", "1e3", "inf", "nan", "5s", "1,5", "9999999999", "\u0665"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/rerank"])
def test_what_is_no_number_of_seconds_is_refused_by_the_headers_name(served: Served, value: str, path: str):
    headers = {"x-request-timeout": value.encode()}
    answer = served.http.post(path, json=GENERATING[path], headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "x-request-timeout", "invalid_value")
    assert error["message"] == "x-request-timeout must be a number of seconds above 0, such as 30."
    assert not served.engine.requests


def test_what_a_client_says_of_its_own_patience_changes_nothing(served: Served):
    headers = {"x-stainless-read-timeout": "0.01", "x-stainless-timeout": "0.01"}
    served.engine.script = always(Wait(0.1), delta("x"), stop(), finished())
    assert served.http.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
    assert served.request.max_seconds == 0


def test_a_wait_that_is_too_long_for_it_is_a_429_with_the_engines_word(served: Served):
    served.engine.script = always(Overloaded("It would take about 40 s to begin this.", retry_after=35))
    answer = served.http.post("/v1/completions", json={"prompt": "a"}, headers=within("5"))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "35")


def test_a_web_page_may_send_it():
    access = Access(origins=frozenset({"https://page.example"}), limits=DEFAULT_SERVER_LIMITS)
    asking = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with running(ScriptedEngine(), access=access) as url:
        allowed = httpx.options(url + "/v1/completions", headers=asking).headers["access-control-allow-headers"]
    assert "x-request-timeout" in allowed.split(", ")
