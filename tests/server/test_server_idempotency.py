"""`Idempotency-Key`: the same request with the same key gets the same answer, computed once."""

from __future__ import annotations

import json
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import openai
import pytest
from resuming import CHAT, COMPLETIONS, MESSAGES, RESPONSES, blocks, cut, id_of, resume
from scripted_engine import Until, Wait, always, delta, finished, stop
from server_harness import running

from penstock.journal import StreamJournal

HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": ["a", "b"]},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9, "model": "acme/tiny-1"},
    "/generate": {"prompt": "Hi"},
}


@pytest.fixture
def key() -> str:
    """A key that no other test has used, as tests share a server."""
    return secrets.token_hex(8)


def keyed(http: httpx.Client, path: str, key: str, **fields: object) -> httpx.Response:
    return http.post(path, json=BODIES[path] | fields, headers={"Idempotency-Key": key})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_same_request_with_the_same_key_is_the_same_answer(served, path, stream, key):
    first, again, other = (keyed(served.http, path, each, stream=stream) for each in (key, key, key + "2"))
    assert first.status_code == 200, first.text
    assert again.content == first.content
    prompts = len(served.engine.requests) // 3
    assert served.engine.requests[:prompts] == served.engine.requests[prompts : 2 * prompts]
    assert served.engine.requests[0].drawn_seed != served.engine.requests[-1].drawn_seed
    if path != "/generate":
        assert other.content != first.content


def test_a_key_is_one_requests(served, key):
    assert keyed(served.http, CHAT, key, max_tokens=2).status_code == 200
    reused = keyed(served.http, CHAT, key, max_tokens=1)
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert reused.json()["error"]["param"] == "Idempotency-Key"
    assert keyed(served.http, COMPLETIONS, key).status_code == 200, "a key belongs to its path"


@pytest.mark.parametrize("key", ["", "a b", "k" * 256])
def test_what_is_no_key_is_refused_by_name(served, key):
    refused = keyed(served.http, CHAT, key)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_a_keyed_stream_is_resumed_with_its_key_and_with_no_other(served, key):
    served.engine.script = always(delta("a"), delta("b"), stop(), finished())
    events = blocks(keyed(served.http, CHAT, key, stream=True).content)
    body = BODIES[CHAT] | {"stream": True}
    rest = resume(served.http, CHAT, body, id_of(events[1]), **{"Idempotency-Key": key})
    assert rest.content == resume(served.http, CHAT, body, id_of(events[1])).content == b"".join(events[2:])
    wrong = resume(served.http, CHAT, body, id_of(events[1]), **{"Idempotency-Key": "other"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "Idempotency-Key")
    whole = resume(served.http, CHAT, BODIES[CHAT], id_of(events[1]), **{"Idempotency-Key": key})
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_background_response_is_made_once(served, key):
    go = threading.Event()
    served.engine.script = always(delta("a"), Until(go), stop(), finished())
    made = [keyed(served.http, RESPONSES, key, background=True).json() for _ in range(3)]
    assert len({each["id"] for each in made}) == 1
    go.set()
    url = f"{RESPONSES}/{made[0]['id']}"
    served.engine.wait_until(lambda: served.http.get(url).json()["status"] == "completed")
    assert keyed(served.http, RESPONSES, key, background=True).json() == served.http.get(url).json()
    assert len(served.engine.requests) == 1


def test_who_asks_again_while_it_is_answered_gets_the_answer_and_the_first_is_told(served, key):
    served.engine.script = always(Wait())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, served.url + CHAT, json=BODIES[CHAT], headers={"Idempotency-Key": key})
        served.engine.wait_until(lambda: bool(served.engine.live))
        served.engine.script = always(delta("a"), stop(), finished())
        assert keyed(served.http, CHAT, key).status_code == 200
        told = first.result(10)
    assert (told.status_code, told.json()["error"]["code"]) == (409, "resumed_elsewhere")
    assert told.headers["x-should-retry"] == "false"
    assert served.engine.left == [served.engine.requests[0].id]


def test_with_a_journal_a_key_outlives_the_server(served, tmp_path, key):
    answers = []
    for _ in range(2):
        with (
            closing(StreamJournal(tmp_path)) as journal,
            running(served.engine, journal=journal) as url,
            httpx.Client(base_url=url) as http,
        ):
            answers.append(keyed(http, CHAT, key).json())
            assert keyed(http, CHAT, key, max_tokens=2).status_code == 422
    assert answers[0] == answers[1]


def test_the_official_client_sends_one(served, key):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    asked = {"model": "acme/tiny-1", "messages": HI, "extra_headers": {"Idempotency-Key": key}}
    assert client.chat.completions.create(**asked) == client.chat.completions.create(**asked)


def test_a_stored_completion_is_stored_once(served, key):
    ids = {keyed(served.http, CHAT, key, store=True).json()["id"] for _ in range(2)}
    listed = served.http.get(CHAT).json()["data"]
    assert [each["id"] for each in listed if each["id"] in ids] == list(ids)
    assert json.dumps(listed)
    assert cut(served.http, CHAT, BODIES[CHAT] | {"stream": True}, 1)
