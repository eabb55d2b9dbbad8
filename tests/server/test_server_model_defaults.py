"""A model's own sampling defaults, over HTTP: where a request says nothing, and only there."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_harness import CARD, running

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/generate": {"prompt": "Hi"},
}


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def http(engine):
    card = replace(CARD, sampling_defaults=(("temperature", 0.25), ("top_p", 0.9)))
    with running(engine, card=card) as url, httpx.Client(base_url=url, timeout=10) as http:
        yield http


@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_says_nothing_is_sampled_as_the_model_wants(http, engine, path):
    assert http.post(path, json=BODIES[path]).status_code == 200
    assert engine.requests[-1].sampling.entries == (("temperature", 0.25), ("top_p", 0.9))


@pytest.mark.parametrize("path", BODIES)
def test_a_requests_own_value_wins_each_for_itself(http, engine, path):
    assert http.post(path, json=BODIES[path] | {"temperature": 0.5}).status_code == 200
    assert engine.requests[-1].sampling.entries == (("temperature", 0.5), ("top_p", 0.9))
    assert http.post(path, json=BODIES[path] | {"temperature": 1, "top_p": 1}).status_code == 200
    assert engine.requests[-1].sampling.entries == ()


def test_null_is_nothing_said(http, engine):
    path = "/v1/completions"
    assert http.post(path, json=BODIES[path] | {"temperature": None}).status_code == 200
    assert engine.requests[-1].sampling.get("temperature", 1.0) == 0.25


def test_an_embedding_is_not_sampled(http, engine):
    assert http.post("/v1/embeddings", json={"input": "Hi"}).status_code == 200
    assert engine.requests[-1].sampling.entries == ()


def test_the_model_says_what_its_defaults_are(http):
    assert http.get("/v1/models").json()["data"][0]["default_sampling_params"] == {"temperature": 0.25, "top_p": 0.9}


def test_the_page_shows_them_and_so_does_the_openapi_document(http):
    shown = {each["name"]: each["default"] for each in http.get("/engine/sampling").json()["data"]}
    assert (shown["temperature"], shown["top_p"], shown["top_k"], shown["max_tokens"]) == (0.25, 0.9, 0, None)
    document = http.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/generate"):
        [content] = document["paths"][path]["post"]["requestBody"]["content"].values()
        assert content["schema"]["properties"]["temperature"]["default"] == 0.25


def test_a_model_without_any_has_none(served):
    assert served.http.get("/v1/models").json()["data"][0]["default_sampling_params"] == {}
    served.chat()
    assert served.request.sampling.entries == ()
