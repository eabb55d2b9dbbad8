"""Anthropic's messages, through the official client and on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest
from scripted_engine import Wait, always, delta, failed, finished, length, stop
from server_harness import running

from penstock.contract.errors import EngineDead, EngineFault, Overloaded, PromptTooLong
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.server_config import ServerConfig
from penstock.server import open_access

MODEL = "acme/tiny-1"
HI = [{"role": "user", "content": "Hi"}]
USAGE = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 2}


@pytest.fixture
def client(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer(client, served):
    served.engine.script = always(delta("Hel"), delta("lo"), stop(), finished(cached=2))
    answer = client.messages.create(model=MODEL, max_tokens=9, messages=HI, system="Be brief.")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert [block.text for block in answer.content] == ["Hello"]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.model_dump(exclude_none=True) == USAGE
    assert answer.id == served.request.id
    assert answer._request_id is None or answer._request_id
    assert served.request.prompt == ChatPrompt((Message("system", "Be brief."), Message("user", "Hi")))
    assert served.request.stop.max_tokens == 9


def test_a_stream_is_the_answer_in_events(client, served):
    served.engine.script = always(delta("Hel"), delta("", raw=b"\xf0"), delta("lo"), stop(by="!"), finished(cached=2))
    whole = client.messages.create(model=MODEL, max_tokens=9, messages=HI)
    with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert texts == ["Hel", "lo"]
    same = {"content", "stop_reason", "stop_sequence", "usage", "role", "model", "type"}
    assert final.model_dump(include=same) == whole.model_dump(include=same)
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "!")


def test_the_events_come_in_anthropics_order(served):
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, "stream": True}
    answer = served.http.post("/v1/messages", json=body)
    assert answer.headers["content-type"] == "text/event-stream"
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    datas = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert [lines[0].removeprefix("event: ") for lines in events] == [data["type"] for data in datas]
    assert [data["type"] for data in datas] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert datas[0]["message"]["usage"]["input_tokens"] == len("user>Hi;")
    assert datas[-2]["usage"]["output_tokens"] == 2


def test_the_length_limit_is_said(client, served):
    served.engine.script = always(delta("x"), length(), finished())
    assert client.messages.create(model=MODEL, max_tokens=1, messages=HI).stop_reason == "max_tokens"


def test_what_is_asked_reaches_the_engine(client, served):
    client.messages.create(
        model=MODEL,
        max_tokens=9,
        stop_sequences=["a", "b"],
        metadata={"user_id": "al"},
        cache_control={"type": "ephemeral"},
        system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
            {"role": "assistant", "content": "C"},
            {"role": "user", "content": "D"},
        ],
        extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9},
    )
    request = served.request
    assert request.stop.strings == ("a", "b")
    assert request.tenant == "al"
    assert [request.sampling.get(name, None) for name in ("temperature", "top_k", "top_p")] == [0.5, 3, 0.9]
    assert [message.content for message in request.prompt.messages] == ["S", "A\nB", "C", "D"]


def test_tokens_are_counted_as_they_would_be_generated_from(client):
    count = client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.")
    assert count.input_tokens == len("system>Be brief.;user>Hi;")


TEXT = {"type": "text", "text": "x"}
WRONG = {
    "max_tokens": {"max_tokens": None},
    "max_tokens ": {"max_tokens": 0},
    "messages": {"messages": []},
    "messages.0.role": {"messages": [{"role": "robot", "content": "x"}]},
    "messages.0.content": {"messages": [{"role": "user"}]},
    "messages.0.content.1.type": {"messages": [{"role": "user", "content": [TEXT, {"type": "image"}]}]},
    "messages.0.content.0.type": {"messages": [{"role": "user", "content": [TEXT | {"type": "thinking"}]}]},
    "messages.0.content.0.citations": {"messages": [{"role": "user", "content": [TEXT | {"citations": [1]}]}]},
    "messages.0.content.0.cache_control.type": {
        "messages": [{"role": "user", "content": [TEXT | {"cache_control": {"type": "for ever"}}]}]
    },
    "system": {"system": 1},
    "stop_sequences": {"stop_sequences": ["a"] * 65},
    "stop_sequences ": {"stop_sequences": [""]},
    "metadata.x": {"metadata": {"x": 1}},
    "surprise": {"surprise": 1},
    "n": {"n": 2},
    "temperature": {"temperature": 3.0},
}


@pytest.mark.parametrize("param", WRONG)
def test_what_is_wrong_is_a_bad_request_that_names_it(client, param):
    fields = {"max_tokens": 9, "messages": HI} | WRONG[param]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=9, messages=HI, extra_body=fields)
    error = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert param.strip() in error["error"]["message"]
    assert error["request_id"] == caught.value.response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised", "kind"),
    [
        (PromptTooLong(99, 64), anthropic.BadRequestError, "invalid_request_error"),
        (Overloaded("Full."), anthropic.RateLimitError, "rate_limit_error"),
        (EngineFault("Broken."), anthropic.InternalServerError, "api_error"),
        (EngineDead("Dead."), anthropic.APIStatusError, "overloaded_error"),
    ],
)
def test_each_error_has_the_clients_own_class(client, served, stream, error, raised, kind):
    served.engine.script = always(error)
    with pytest.raises(raised) as caught:
        client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=stream)
    assert caught.value.body["error"]["type"] == kind


def test_a_failure_on_the_way_is_raised_after_what_came_before(client, served):
    served.engine.script = always(delta("Hel"), failed("Broken."))
    texts = []
    with (
        pytest.raises(anthropic.APIStatusError, match="Broken"),
        client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream,
    ):
        texts += list(stream.text_stream)
    with client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=True) as events:
        assert [next(events).type for _ in range(3)] == ["message_start", "content_block_start", "content_block_delta"]
        with pytest.raises(anthropic.APIStatusError):
            next(events)


def test_what_is_refused_before_the_route_has_anthropics_shape_too(client, served):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude", max_tokens=9, messages=HI)
    assert caught.value.body["error"]["type"] == "not_found_error"
    answer = served.http.get("/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")
    assert len(answer.content) == int(answer.headers["content-length"])
    answer = served.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert served.http.post("/v1/completions", json={}).json()["error"]["code"]


def test_a_key_is_sent_as_anthropics_clients_send_it(served):
    key = "sk-0123456789abcdef"
    with running(served.engine, access=open_access(ServerConfig(), {"PENSTOCK_API_KEY": key})) as url:
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
            assert client.messages.create(model=MODEL, max_tokens=9, messages=HI).content[0].text == "Hello"
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(model=MODEL, max_tokens=9, messages=HI)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_leaving_a_stream_aborts_it(client, served):
    served.engine.script = always(delta("x"), Wait())
    with client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=True) as events:
        next(iter(events))
    served.engine.wait_until(lambda: len(served.engine.left) == 1)


async def test_the_async_client(served):
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none") as client:
        answer = await client.messages.create(model=MODEL, max_tokens=9, messages=HI)
        async with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert answer.content[0].text == text == "Hello"
