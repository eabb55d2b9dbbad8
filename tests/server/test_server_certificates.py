"""`certificate: true`: the engine's certificate at the end of an answer, and its digest in a header."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_engine import Until, always, delta, failed, length, stop
from server_harness import CARD
from sse_reader import read_events

from penstock.contract.events import RequestFinished, Usage

CERTIFICATE = '{"answer":[],"digest":"d1ce","version":1}'
DIGEST = "sha256:d1ce"
CERTIFIED = always(delta("Hel"), delta("lo"), stop(), RequestFinished(Usage(13, 5, 8), certificate=CERTIFICATE))
ABORTED = always(delta("Hel"), length(), RequestFinished(Usage(13, 5, 8)))

SAID = {"messages": [{"role": "user", "content": "Hi"}]}
RESPONSES = "/v1/responses"
ENDPOINTS = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    "/v1/messages": SAID | {"max_tokens": 4},
    "/generate": {"prompt": "Hi"},
}
STREAMED = [path for path in ENDPOINTS if path != "/generate"]  # whose stream is plain text


def ask(served, path: str, **fields: Any) -> httpx.Response:
    return served.http.post(path, json=ENDPOINTS[path] | fields)


def objects(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without `[DONE]`."""
    return [json.loads(event.data) for event in read_events(response.content) if event.data != "[DONE]"]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_whole_answer_has_it_as_text_and_its_digest_in_a_header(served, path):
    served.engine.script = CERTIFIED
    answer = ask(served, path, certificate=True)
    assert answer.json()["certificate"] == CERTIFICATE
    assert answer.headers["x-penstock-certificate"] == DIGEST
    assert served.engine.requests[-1].certified


@pytest.mark.parametrize("path", ENDPOINTS)
def test_none_comes_unasked_and_no_log_probabilities_are_shown(served, path):
    for fields in ({}, {"certificate": False}, {"certificate": None}):
        answer = ask(served, path, **fields)
        assert "certificate" not in answer.json()
        assert "x-penstock-certificate" not in answer.headers
        assert not served.engine.requests[-1].certified
    served.engine.script = CERTIFIED
    [choice] = ask(served, path, certificate=True).json().get("choices", [{}])
    assert choice.get("logprobs") is None


@pytest.mark.parametrize("path", STREAMED)
def test_none_comes_unasked_in_a_stream(served, path):
    served.engine.script = CERTIFIED
    assert "certificate" not in ask(served, path, stream=True).text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_ends_with_it_in_a_chunk_of_no_choice(served, path):
    served.engine.script = CERTIFIED
    for options, usage in (({}, False), ({"stream_options": {"include_usage": True}}, True)):
        response = ask(served, path, stream=True, certificate=True, **options)
        *pieces, last = objects(response)
        assert response.text.endswith("\n\n")
        assert last["choices"] == []
        assert last["certificate"] == CERTIFICATE
        assert ("usage" in last) is usage
        assert all("certificate" not in piece for piece in pieces)


def test_a_stream_of_messages_ends_with_it_in_the_last_event(served):
    served.engine.script = CERTIFIED
    *pieces, last = objects(ask(served, "/v1/messages", stream=True, certificate=True))
    assert last == {"type": "message_stop", "certificate": CERTIFICATE}
    assert all("certificate" not in json.dumps(piece) for piece in pieces)


def test_a_stream_of_a_response_ends_with_it_in_the_response(served):
    served.engine.script = CERTIFIED
    first, second, *pieces, last = objects(ask(served, RESPONSES, stream=True, certificate=True))
    assert last["type"] == "response.completed"
    assert last["response"]["certificate"] == CERTIFICATE
    assert [each["response"]["certificate"] for each in (first, second)] == [None, None]
    assert all("certificate" not in json.dumps(piece) for piece in pieces)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_answer_that_was_ended_has_none(served, path):
    served.engine.script = ABORTED
    answer = ask(served, path, certificate=True)
    assert answer.json()["certificate"] is None
    assert "x-penstock-certificate" not in answer.headers


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
def test_a_stored_response_is_got_with_it(served, fields):
    served.engine.script = CERTIFIED
    made = ask(served, RESPONSES, certificate=True, **fields)
    response_id = objects(made)[-1]["response"]["id"] if "stream" in fields else made.json()["id"]
    deadline = time.monotonic() + 10
    while (got := served.http.get(f"{RESPONSES}/{response_id}")).json()["status"] == "in_progress":
        assert got.json()["certificate"] is None
        assert "x-penstock-certificate" not in got.headers
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (got.json()["status"], got.json()["certificate"]) == ("completed", CERTIFICATE)
    assert got.headers["x-penstock-certificate"] == DIGEST
    events = objects(served.http.get(f"{RESPONSES}/{response_id}", params={"stream": "true"}))
    assert [each["response"]["certificate"] for each in events if "response" in each] == [None, None, CERTIFICATE]


def test_a_response_in_the_background_that_was_cancelled_or_failed_has_none(served):
    released = threading.Event()
    served.engine.script = always(
        delta("Hel"), Until(released), stop(), RequestFinished(Usage(), certificate=CERTIFICATE)
    )
    made = ask(served, RESPONSES, certificate=True, background=True).json()
    assert (made["status"], made["certificate"]) == ("in_progress", None)
    cancelled = served.http.post(f"{RESPONSES}/{made['id']}/cancel")
    assert (cancelled.json()["status"], cancelled.json()["certificate"]) == ("cancelled", None)
    assert "x-penstock-certificate" not in cancelled.headers
    released.set()
    served.engine.script = always(delta("Hel"), failed())
    *_, last = objects(ask(served, RESPONSES, certificate=True, stream=True))
    assert (last["response"]["status"], last["response"]["certificate"]) == ("failed", None)


def test_a_stored_completion_is_got_with_it(served):
    served.engine.script = CERTIFIED
    for stream in (False, True):
        answer = ask(served, "/v1/chat/completions", certificate=True, store=True, stream=stream)
        answer_id = objects(answer)[0]["id"] if stream else answer.json()["id"]
        assert served.http.get(f"/v1/chat/completions/{answer_id}").json()["certificate"] == CERTIFICATE


def test_foreign_clients_find_it_where_they_keep_what_they_do_not_know(served, client):
    served.engine.script = CERTIFIED
    more = {"extra_body": {"certificate": True}}
    made = client.responses.create(model=CARD.name, input="Hi", **more)
    assert made.certificate == CERTIFICATE
    assert client.responses.retrieve(made.id).certificate == CERTIFICATE
    with client.responses.stream(model=CARD.name, input="Hi", **more) as stream:
        assert stream.get_final_response().certificate == CERTIFICATE
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as messages:
        said = {"model": CARD.name, "max_tokens": 4, **SAID}
        assert messages.messages.create(**said, **more).certificate == CERTIFICATE
        *_, last = messages.messages.create(stream=True, **said, **more)
        assert (last.type, last.certificate) == ("message_stop", CERTIFICATE)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ["a", "b"]}, "certificate is of one prompt, and this has 2"),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, "certificate is of generated tokens"),
        ({"certificate": "yes"}, "certificate"),
    ],
)
def test_what_cannot_be_certified_is_refused_by_name(served, fields, said):
    error = error_of(served.complete(**{"certificate": True} | fields))
    assert error["param"] == "certificate"
    assert said in error["message"]


def test_a_stream_of_plain_text_has_no_place_for_it(served):
    error = error_of(ask(served, "/generate", certificate=True, stream=True))
    assert error["param"] == "certificate"
    assert "no place in a stream of plain text" in error["message"]
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/responses/compact", {"input": "Hi"}),
        ("/v1/responses/input_tokens", {"input": "Hi"}),
        ("/v1/messages/count_tokens", SAID),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
def test_endpoints_without_certificates_refuse_the_field(served, path, body):
    assert "certificate" in error_of(served.http.post(path, json=body | {"certificate": True}))["message"]
    assert not served.engine.requests


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_header_of_answers_asks_for_nothing_and_says_so(served, path):
    answer = served.http.post(path, json=ENDPOINTS[path], headers={"x-penstock-certificate": "true"})
    assert 'ask with "certificate": true in the body' in error_of(answer)["message"]
    assert not served.engine.requests
