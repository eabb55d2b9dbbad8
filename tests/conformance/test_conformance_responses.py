"""OpenAI's responses through the official client: whole, streamed, kept, continued, cancelled."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from conformance_harness import MODEL, wait_until

pytestmark = pytest.mark.model

QUESTION = "What is the capital of France?"
ASKED = {"model": MODEL, "input": QUESTION, "temperature": 0.9, "top_p": 0.9, "max_output_tokens": 40}


@pytest.fixture(scope="module")
def client(default_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=default_server.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.mark.parametrize("limit", [4, 64])
def test_a_streamed_response_is_the_whole_one_byte_for_byte(client, limit):
    asked = {**ASKED, "temperature": 0, "max_output_tokens": limit}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == ("response.incomplete" if limit == 4 else "response.completed")
    assert (final.status, final.incomplete_details) == (whole.status, whole.incomplete_details)
    pieces = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert pieces.encode() == final.output_text.encode() == whole.output_text.encode()
    assert [event.text for event in events if event.type == "response.output_text.done"] == [whole.output_text]
    assert (final.usage.input_tokens, final.usage.output_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )


def test_logprobs_are_those_of_chat(client):
    terms = {"model": MODEL, "temperature": 0, "top_logprobs": 3}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], max_completion_tokens=12, logprobs=True, **terms
    )
    expected = [each.model_dump() for each in chat.choices[0].logprobs.content]
    asked = terms | {"input": QUESTION, "max_output_tokens": 12, "include": ["message.output_text.logprobs"]}
    [message] = client.responses.create(**asked).output
    assert [each.model_dump() for each in message.content[0].logprobs] == expected
    streamed = [
        (each.token, each.logprob, [(top.token, top.logprob) for top in each.top_logprobs])
        for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    assert streamed == [
        (each["token"], each["logprob"], [(top["token"], top["logprob"]) for top in each["top_logprobs"]])
        for each in expected
    ]


def test_the_events_open_and_close_in_pairs(client):
    kinds = [event.type for event in client.responses.create(**ASKED, stream=True)]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}


def test_the_stream_helper_ends_with_the_whole_response(client):
    with client.responses.stream(**{**ASKED, "temperature": 0}) as stream:
        final = stream.get_final_response()
    assert final.output_text == client.responses.create(**{**ASKED, "temperature": 0}).output_text


def test_a_response_is_kept_continued_and_deleted(client):
    first = client.responses.create(**ASKED)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(**{**ASKED, "input": "And of Italy?"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_that_is_not_stored_is_not_found(client):
    kept = client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_work_in_the_background_can_be_awaited_and_cancelled(client, default_server):
    working = client.responses.create(**ASKED, background=True)
    assert working.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(working.id).status in ("completed", "incomplete"))
    assert client.responses.retrieve(working.id).output_text
    story = {**ASKED, "input": "Tell me a very long story.", "max_output_tokens": 4000}
    long = client.responses.create(**story, background=True)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    assert default_server.wait_idle(5.0) <= 5.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3e9}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
    ],
)
def test_a_mistake_is_the_clients_own_error(client, stream, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASKED, "stream": stream, **fields})
    assert caught.value.param == param
    assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_an_unknown_predecessor_is_named(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**ASKED, previous_response_id="resp_nowhere")
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == "previous_response_id"


async def test_the_async_client_gets_the_same(client, default_server):
    asked = {**ASKED, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=default_server.url + "/v1", api_key="none", timeout=240) as clients:
        stream = await clients.responses.create(**asked, stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert text == client.responses.create(**asked).output_text
