"""A model under several names, and under any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import anthropic
import httpx
import pytest
from scripted_engine import ScriptedEngine
from server_harness import CARD, LIMITS, running

HI = [{"role": "user", "content": "Hi"}]
NAMED = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 5}),
]


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    card = replace(CARD, aliases=("gpt-4o", "claude"), any_name=request.param)
    with running(ScriptedEngine(), card=card) as url, httpx.Client(base_url=url, timeout=10) as http:
        yield http


several = pytest.mark.parametrize("names", [False], indirect=True)
every = pytest.mark.parametrize("names", [True], indirect=True)


@several
@pytest.mark.parametrize(("path", "body"), NAMED)
@pytest.mark.parametrize("name", ["acme/tiny-1", "gpt-4o", "claude"])
def test_an_answer_repeats_the_name_that_was_asked_for(names, path, body, name):
    assert names.post(path, json=body | {"model": name}).json()["model"] == name


@several
@pytest.mark.parametrize(("path", "body"), NAMED)
def test_an_answer_has_the_first_name_where_none_was_asked_for(names, path, body):
    assert names.post(path, json=body).json()["model"] == "acme/tiny-1"


@several
def test_a_stream_repeats_the_name_too(names):
    text = names.post("/v1/chat/completions", json={"messages": HI, "model": "claude", "stream": True}).text
    assert '"model":"claude"' in text
    assert "acme" not in text


@several
def test_every_name_is_listed_and_found(names):
    listed = names.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["acme/tiny-1", "gpt-4o", "claude"]
    assert {model["root"] for model in listed} == {"acme/tiny-1"}
    assert names.get("/v1/models/gpt-4o").json() == listed[1]


@several
def test_another_name_is_refused_with_all_that_are_served(names):
    for answer in (names.get("/v1/models/gpt-3"), names.post("/tokenize", json={"prompt": "x", "model": "gpt-3"})):
        assert answer.status_code == 404
        assert "'acme/tiny-1', 'gpt-4o', 'claude'" in answer.json()["error"]["message"]


@every
@pytest.mark.parametrize(("path", "body"), NAMED)
def test_any_name_is_served_and_repeated(names, path, body):
    answer = names.post(path, json=body | {"model": "whatever/you like"})
    assert answer.status_code == 200
    assert answer.json()["model"] == "whatever/you like"


@every
def test_any_name_is_found_and_the_servers_own_are_listed(names):
    assert names.get("/v1/models/whatever").json()["id"] == "whatever"
    assert [model["id"] for model in names.get("/v1/models").json()["data"]] == ["acme/tiny-1", "gpt-4o", "claude"]


@every
def test_a_name_is_no_place_for_a_text(names):
    answer = names.post("/v1/completions", json={"prompt": "Hi", "model": "x" * (LIMITS.max_name_chars + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


# --- Anthropic's clients

VERSION = {"anthropic-version": "2023-06-01"}


@several
def test_anthropics_clients_are_answered_in_their_form(names):
    with anthropic.Anthropic(base_url=str(names.base_url), api_key="none", max_retries=0) as client:
        page = client.models.list(limit=2)
        assert [model.id for model in page.data] == ["acme/tiny-1", "gpt-4o"]
        assert page.has_more
        assert [model.id for model in client.models.list(limit=2)] == ["acme/tiny-1", "gpt-4o", "claude"]
        found = client.models.retrieve("claude")
        assert (found.type, found.display_name, found.created_at.year) == ("model", "claude", 2023)
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"


@several
@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=" + "9" * 5000, "surprise=1"])
def test_a_page_that_cannot_be_is_refused_in_their_form_too(names, query):
    answer = names.get(f"/v1/models?{query}", headers=VERSION)
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


@several
def test_a_page_before_a_name_ends_there(names):
    page = names.get("/v1/models?before_id=claude&after_id=acme/tiny-1", headers=VERSION).json()
    assert [model["id"] for model in page["data"]] == ["gpt-4o"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("gpt-4o", "gpt-4o", False)


@several
def test_a_served_model_cannot_be_deleted(names):
    assert names.delete("/v1/models/claude").json()["error"]["code"] == "model_not_deletable"
    assert names.delete("/v1/models/other").status_code == 404
