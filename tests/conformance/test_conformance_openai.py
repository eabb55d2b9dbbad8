"""The official OpenAI client against the default command: chat, completions, tools, forms, errors and retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from conformance_harness import (
    ASK_WEATHER,
    MODEL,
    NAMED,
    PARIS,
    WEATHER,
    counted,
    joined_chat,
    joined_text,
    whole_chat,
    whole_text,
)
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model


class City(BaseModel):
    """A schema that an answer must follow."""

    name: str = Field(max_length=12)
    large: bool
    continent: Literal["Asia", "Europe"]


CITY_FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "strict": True,
        "schema": {**City.model_json_schema(), "additionalProperties": False},
    },
}

CHATS: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": "Two words about the sea 🌊, please."}], "max_tokens": 24},
    "choices": {"messages": PARIS, "n": 3, "max_tokens": 12, "temperature": 1.2},
    "ended choices": {"messages": PARIS, "n": 3, "stop": ".", "logprobs": True},
    "logprobs": {"messages": PARIS, "logprobs": True, "top_logprobs": 3, "temperature": 0},
    "bare logprobs": {"messages": PARIS, "logprobs": True, "max_tokens": 5, "temperature": 0},
    "stop": {"messages": PARIS, "stop": ["is Par", "zzz"], "temperature": 0, "logprobs": True},
    "kept stop": {
        "messages": PARIS,
        "stop": "is Par",
        "temperature": 0,
        "extra_body": {"include_stop_str_in_output": True},
    },
    "required call": {
        "messages": ASK_WEATHER,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 48,
        "logprobs": True,
    },
    "named call": {"messages": ASK_WEATHER, "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 32, "n": 2},
    "tools unused": {"messages": PARIS, "tools": [WEATHER], "tool_choice": "auto", "max_tokens": 12, "temperature": 0},
    "tools hidden": {"messages": PARIS, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 12, "temperature": 0},
    "form": {"messages": PARIS, "response_format": CITY_FORM, "max_tokens": 40, "temperature": 1.5, "logprobs": True},
    "emoji": {"messages": PARIS, "extra_body": {"structured_outputs": {"choice": ["👩🏽‍🚀 ok 🤷"]}}, "logprobs": True},
    "penalties": {
        "messages": PARIS,
        "max_tokens": 16,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "logit_bias": {"28": -5},
        "extra_body": {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1},
    },
    "going on": {
        "messages": [*PARIS, {"role": "assistant", "content": "The capital"}],
        "max_tokens": 8,
        "extra_body": {"continue_final_message": True},
    },
}

TEXTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Once upon a time", "max_tokens": 24},
    "logprobs": {"prompt": "Count: one, two,", "max_tokens": 10, "logprobs": 3},
    "echo": {"prompt": "The capital of France is", "max_tokens": 4, "logprobs": 2, "echo": True, "n": 2},
    "echo alone": {"prompt": "The capital of France is", "max_tokens": 4, "echo": True},
    "prompts": {"prompt": ["The sea", "The sky 🌌"], "n": 2, "max_tokens": 8, "logprobs": 0},
    "ids": {"prompt": [[504, 3575], [504]], "max_tokens": 6},
    "stop": {
        "prompt": "Count: one, two, three, four,",
        "temperature": 0,
        "stop": "even",
        "max_tokens": 30,
        "logprobs": 1,
    },
    "stop id": {
        "prompt": "Count: one, two,",
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"stop_token_ids": [28]},
    },
    "emoji": {
        "prompt": "Say",
        "logprobs": 0,
        "max_tokens": 40,
        "extra_body": {"structured_outputs": {"choice": ["🤷🏽‍♀️."]}},
    },
}


@pytest.fixture(scope="module")
def client(default_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=default_server.url + "/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def chat(client):
    """Ask for a seeded chat completion."""

    def request(**fields):
        return client.chat.completions.create(**{"model": MODEL, "temperature": 0.8, "seed": 11, **fields})

    return request


@pytest.fixture(scope="module")
def complete(client):
    """Ask for a seeded text completion."""

    def request(**fields):
        return client.completions.create(**{"model": MODEL, "temperature": 0.8, "seed": 11, **fields})

    return request


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CHATS)
def test_a_streamed_chat_answer_is_the_whole_one_byte_for_byte(chat, case):
    whole = chat(**CHATS[case])
    chunks = list(chat(**CHATS[case], stream=True, stream_options={"include_usage": True}))
    assert joined_chat(chunks) == whole_chat(whole)
    assert counted(chunks[-1].usage) == counted(whole.usage)
    assert len(whole.choices) == CHATS[case].get("n", 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", TEXTS)
def test_a_streamed_completion_is_the_whole_one_byte_for_byte(complete, case):
    whole = complete(**TEXTS[case])
    chunks = list(complete(**TEXTS[case], stream=True, stream_options={"include_usage": True}))
    assert joined_text(chunks) == whole_text(whole)
    assert counted(chunks[-1].usage) == counted(whole.usage)
    if TEXTS[case].get("logprobs") is not None:
        assert all(choice.logprobs.tokens for choice in whole.choices)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["ended choices", "logprobs", "required call", "named call", "form", "emoji"])
def test_the_stream_helper_ends_with_the_whole_answer(client, case):
    fields = {"model": MODEL, "temperature": 0.8, "seed": 11, **CHATS[case]}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    own = {"stop_reason": None}  # not a field of OpenAI's: the helper does not accumulate it
    assert [choice | own for choice in whole_chat(final)] == [choice | own for choice in whole_chat(whole)]
    assert "chunk" in kinds
    if "call" in case:
        assert "tool_calls.function.arguments.done" in kinds


async def test_the_async_client_gets_the_same_answers_from_a_shared_batch(default_server, chat, complete):
    chats = [CHATS[case] for case in ("text", "ended choices", "named call", "form", "penalties", "stop")]
    texts = [TEXTS[case] for case in ("logprobs", "echo", "prompts", "emoji")]
    alone = [whole_chat(chat(**fields)) for fields in chats], [whole_text(complete(**fields)) for fields in texts]
    base = {"model": MODEL, "temperature": 0.8, "seed": 11}
    async with openai.AsyncOpenAI(base_url=default_server.url + "/v1", api_key="none", timeout=240) as client:

        async def streamed(fields) -> list:
            stream = await client.chat.completions.create(**base | fields, stream=True)
            return joined_chat([chunk async for chunk in stream])

        async def whole(fields) -> list:
            return whole_text(await client.completions.create(**base | fields))

        together = await asyncio.gather(*map(streamed, chats), *map(whole, texts))
    assert together == [*alone[0], *alone[1]]


def test_a_chat_stream_opens_with_the_role_and_closes_with_the_usage(chat):
    chunks = list(chat(messages=PARIS, max_tokens=6, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert (chunks[0].object, chunks[0].model) == ("chat.completion.chunk", MODEL)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-2].choices[0].delta.model_dump(exclude_none=True) == {}
    assert chunks[-1].choices == []
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 6


def test_without_include_usage_a_stream_says_nothing_of_it(chat):
    assert all(chunk.usage is None and chunk.choices for chunk in chat(messages=PARIS, max_tokens=3, stream=True))


def test_the_wire_is_events_that_end_with_done(client):
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=PARIS, max_tokens=3, stream=True
    ) as response:
        wire = b"".join(response.iter_bytes())
        assert response.headers["content-type"].startswith("text/event-stream")
    *frames, rest = [frame.split(b"\n") for frame in wire.split(b"\n\n")]
    assert rest == [b""]
    assert frames.pop()[0] == b"data: [DONE]"
    assert all(event_id.startswith(b"id: chatcmpl-") for _, event_id in frames)
    assert all(json.loads(data.removeprefix(b"data: "))["object"] == "chat.completion.chunk" for data, _ in frames)


def test_log_probabilities_spell_the_answer_and_are_ordered(chat):
    answer = chat(messages=PARIS, logprobs=True, top_logprobs=5, max_tokens=12, temperature=0)
    entries = answer.choices[0].logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in entries if entry.token != "<|im_end|>")
    assert spelled.decode() == answer.choices[0].message.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 5
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0] <= 0  # greedy


def test_completion_offsets_point_at_their_tokens(complete):
    choice = complete(prompt="Count: one, two,", max_tokens=8, logprobs=1, echo=True).choices[0]
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert choice.text[offset : offset + len(token)] == ("" if token == "<|im_end|>" else token)
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens)


def test_a_list_of_prompts_is_numbered_prompt_by_prompt(complete):
    prompts = ["The sea is", "Cats are"]
    together = complete(prompt=prompts, n=2, max_tokens=6)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    apart = [choice.text for prompt in prompts for choice in complete(prompt=prompt, n=2, max_tokens=6).choices]
    assert [choice.text for choice in together.choices] == apart
    assert len(set(apart)) == 4  # each choice draws its own


def test_a_form_comes_back_as_the_callers_own_type(client):
    fields = {"model": MODEL, "messages": PARIS, "response_format": City, "temperature": 1.5, "max_tokens": 40}
    for seed in (1, 2):
        parsed = client.chat.completions.parse(**fields, seed=seed).choices[0]
        assert isinstance(parsed.message.parsed, City)
        assert parsed.finish_reason == "stop"
        with client.chat.completions.stream(**fields, seed=seed) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


def test_a_call_comes_back_as_the_callers_own_type(client):
    fields = {"model": MODEL, "messages": ASK_WEATHER, "temperature": 1.2, "max_tokens": 48, "seed": 2}
    fields |= {"tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required"}
    choice = client.chat.completions.parse(**fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)
        assert json.loads(call.function.arguments) == call.function.parsed_arguments.model_dump()


def test_a_call_and_its_result_go_back_into_the_conversation(chat):
    first = chat(messages=ASK_WEATHER, tools=[WEATHER], tool_choice=NAMED, max_tokens=32, temperature=0)
    message = first.choices[0].message
    assert message.content is None
    [call] = message.tool_calls
    turns = [*ASK_WEATHER, message, {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}]
    second = chat(messages=turns, tools=[WEATHER], tool_choice="none", max_tokens=12, temperature=0)
    alone = chat(messages=ASK_WEATHER, max_tokens=1, temperature=0)
    assert second.usage.prompt_tokens > alone.usage.prompt_tokens + 20  # the call and its result are in the prompt
    assert second.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        chat(messages=[*turns[:2], {"role": "tool", "tool_call_id": "another", "content": "x"}], tools=[WEATHER])
    assert caught.value.param == "messages.2.tool_call_id"


def test_a_seed_repeats_an_answer_and_another_does_not(chat):
    first, again, other = (chat(messages=PARIS, seed=seed, temperature=1.5, max_tokens=16) for seed in (3, 3, 4))
    assert whole_chat(first) == whole_chat(again) != whole_chat(other)


def test_every_answer_names_its_request(client):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=PARIS, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.request_id == "mine-1"
    assert raw.parse()._request_id == "mine-1"
    assert client.models.list()._request_id is None or client.models.list()._request_id


def test_the_model_can_be_listed_and_retrieved(client):
    [model] = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    assert model.max_model_len == 8192


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "raised", "param", "code"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", "invalid_value"),
        ({"stop": ["a"] * 65}, openai.BadRequestError, "stop", "invalid_value"),
        ({"max_completion_tokens": 9000}, openai.BadRequestError, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": []}, openai.BadRequestError, "messages", "missing_value"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError, "messages", None),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities", "unsupported_parameter"),
        ({"extra_body": {"surprise": 1}}, openai.BadRequestError, "surprise", "unknown_parameter"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type", "invalid_value"),
        ({"model": "another"}, openai.NotFoundError, "model", "model_not_found"),
    ],
)
def test_a_mistake_is_the_clients_own_error_before_any_answer(chat, stream, fields, raised, param, code):
    with pytest.raises(raised) as caught:
        chat(**{"messages": PARIS, "stream": stream, **fields})
    error = caught.value
    assert set(error.body) == {"message", "type", "param", "code"}
    assert (error.type, error.request_id is not None) == ("invalid_request_error", True)
    assert error.param == param or (param is None and error.param)
    assert error.code == code or (code is None and error.code)


def test_a_wrong_path_is_an_error_object_too(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.get("/nowhere", cast_to=object)
    assert caught.value.code == "unknown_url"


@pytest.mark.deep
async def test_a_full_queue_is_tried_again_after_the_time_it_names_and_then_answered(default_server, complete):
    """Two requests of sixteen long choices fill the queue's tokens; the third is refused until they leave."""
    complete(prompt=["Hi"] * 64, max_tokens=1)  # then the server knows its pace, and names a short time
    seen: list[tuple[int, str]] = []
    filling: list[asyncio.Task] = []

    async def note(response: httpx.Response) -> None:
        seen.append((response.status_code, response.headers.get("retry-after", "")))
        if response.status_code == 429:
            for task in filling:
                task.cancel()
            await asyncio.gather(*filling, return_exceptions=True)

    transport = httpx.AsyncClient(event_hooks={"response": [note]}, timeout=240)
    base = {"base_url": default_server.url + "/v1", "api_key": "none", "timeout": 240}
    async with (
        openai.AsyncOpenAI(**base, max_retries=0) as greedy,
        openai.AsyncOpenAI(**base, max_retries=2, http_client=transport) as patient,
        httpx.AsyncClient(base_url=default_server.url) as plain,
    ):
        for first in (1, 2):
            prompt = [first, *[28] * 8000]
            asked = greedy.completions.create(model=MODEL, prompt=prompt, n=16, max_tokens=1)
            filling.append(asyncio.create_task(asked))
        while (await plain.get("/health")).json()["waiting"] < 30:
            await asyncio.sleep(0.005)
        answer = await patient.completions.create(model=MODEL, prompt=[3, *[28] * 1600], n=16, max_tokens=1)
    assert [status for status, _ in seen] == [429, 200]
    assert int(seen[0][1]) >= 1
    assert len(answer.choices) == 16
    assert default_server.wait_idle(5.0) <= 5.0
