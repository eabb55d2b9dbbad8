"""Stored chat completions, through the official client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, always, delta, failed
from server_harness import CARD, running

from penstock.contract.limits import ServerLimits
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.caller import Caller

HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
MODEL = CARD.name


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(engine) -> Iterator[openai.OpenAI]:
    access = Access(limits=ServerLimits(max_stored_responses=3))
    with running(engine, access=access) as url, openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        yield client.with_options(max_retries=0)


def make(client, **fields):
    return client.chat.completions.create(model=MODEL, messages=HI, store=True, **fields)


def test_a_stored_completion_is_found_listed_relabelled_and_deleted(client):
    made = make(client, metadata={"topic": "a"})
    found = client.chat.completions.retrieve(made.id)
    assert found.choices == made.choices
    assert found.metadata == {"topic": "a"}
    assert [each.id for each in client.chat.completions.list()] == [made.id]
    changed = client.chat.completions.update(made.id, metadata={"topic": "b"})
    assert (changed.metadata, changed.choices) == ({"topic": "b"}, made.choices)
    assert [each.id for each in client.chat.completions.list(metadata={"topic": "b"})] == [made.id]
    assert not list(client.chat.completions.list(metadata={"topic": "a"}))
    assert not list(client.chat.completions.list(model="other"))
    gone = client.chat.completions.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "chat.completion.deleted", True)
    for call in (client.chat.completions.retrieve, client.chat.completions.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "completion_not_found"


def test_its_messages_are_listed_in_pages(client):
    made = make(client)
    listed = client.chat.completions.messages.list(made.id, limit=1)
    assert [(message.role, message.content) for message in listed.data] == [("system", "Be brief.")]
    assert listed.has_more
    assert [message.content for message in listed] == ["Be brief.", "Hi"]
    backwards = client.chat.completions.messages.list(made.id, order="desc")
    assert [message.content for message in backwards] == ["Hi", "Be brief."]


def test_a_stream_is_stored_whole(client):
    chunks = list(make(client, stream=True, n=1))
    (stored,) = client.chat.completions.list()
    assert stored.id == chunks[0].id
    assert (stored.object, stored.choices[0].message.content) == ("chat.completion", "Hello")
    assert (stored.usage.prompt_tokens, stored.metadata) == (5, {})


def test_what_is_not_to_be_stored_or_failed_is_not(client, engine):
    client.chat.completions.create(model=MODEL, messages=HI)
    client.chat.completions.create(model=MODEL, messages=HI, store=False)
    engine.script = always(delta("x"), failed())
    with pytest.raises(openai.InternalServerError):
        make(client)
    assert not list(client.chat.completions.list())


def test_the_oldest_make_place(client):
    made = [make(client).id for _ in range(5)]
    assert sorted(each.id for each in client.chat.completions.list()) == sorted(made[2:])


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=x", "surprise=1", "metadata=x"])
def test_a_page_that_cannot_be_is_refused_by_name(client, query):
    make(client)
    answer = httpx.get(f"{client.base_url}chat/completions?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_labels_must_be_given_and_be_labels(client):
    path = f"{client.base_url}chat/completions/{make(client).id}"
    for body in ({}, {"metadata": "x"}, {"metadata": {"a": 1}}):
        assert httpx.post(path, json=body).json()["error"]["param"] == "metadata"


def test_another_key_finds_nothing(engine):
    import hashlib

    keys = ApiKeys(tuple(Caller(hashlib.sha256(key.encode()).digest(), admin=False) for key in ("a" * 16, "b" * 16)))
    with running(engine, access=Access(keys=keys)) as url:
        mine, other = (openai.OpenAI(base_url=url + "/v1", api_key=key * 16, max_retries=0) for key in "ab")
        with mine, other:
            made = make(mine)
            assert not list(other.chat.completions.list())
            with pytest.raises(openai.NotFoundError):
                other.chat.completions.retrieve(made.id)
            assert mine.chat.completions.retrieve(made.id).id == made.id
