"""The official client, sync and async, against the server: what its users will type."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from scripted_engine import Wait, always, delta, failed, finished, stop

from penstock.contract.errors import EngineDead, EngineFault, Overloaded, PromptTooLong

MODEL = "acme/tiny-1"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_answer(client):
    answer = client.chat.completions.create(model=MODEL, messages=HI, temperature=0, max_completion_tokens=5, user="al")
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model, answer.usage.total_tokens) == ("chat.completion", MODEL, 7)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


def test_a_chat_stream_with_usage(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 2
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper_accumulates_what_the_plain_answer_is(client, served):
    served.engine.script = always(delta("a", 0), delta("b", 1), stop(1), delta("c", 0), stop(0), finished())
    with client.chat.completions.stream(model=MODEL, messages=HI, n=2, logprobs=True) as stream:
        final = stream.get_final_completion()
    plain = client.chat.completions.create(model=MODEL, messages=HI, n=2, logprobs=True)
    assert [c.message.content for c in final.choices] == [c.message.content for c in plain.choices] == ["ac", "b"]
    tokens = [[t.token for t in c.logprobs.content] for c in final.choices]
    assert tokens == [[t.token for t in c.logprobs.content] for c in plain.choices] == [["a", "c"], ["b"]]


def test_completions_of_text_and_of_token_ids(client):
    answer = client.completions.create(model=MODEL, prompt=[[1, 2], [3]], max_tokens=4, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].logprobs.text_offset == [0, 3]
    stream = client.completions.create(model=MODEL, prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello"


def test_extensions_travel_in_the_extra_body(client, served):
    client.chat.completions.create(model=MODEL, messages=HI, extra_body={"top_k": 3, "min_tokens": 2})
    assert served.request.sampling.get("top_k", 0) == 3
    assert served.request.stop.min_tokens == 2


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 64


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised", "code"),
    [
        (PromptTooLong(99, 64), openai.BadRequestError, "context_length_exceeded"),
        (Overloaded("Full."), openai.RateLimitError, "overloaded"),
        (EngineFault("Broken."), openai.InternalServerError, "internal_error"),
        (EngineDead("Dead."), openai.InternalServerError, "engine_dead"),
    ],
)
def test_each_error_has_the_clients_own_class(client, served, stream, error, raised, code):
    served.engine.script = always(error)
    with pytest.raises(raised) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, stream=stream)
    assert caught.value.code == code
    assert caught.value.request_id


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_what_is_not_supported_is_a_bad_request_that_names_it(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, modalities=["audio"])
    assert (caught.value.param, caught.value.code) == ("modalities", "unsupported_parameter")


def test_a_failure_on_the_way_is_raised_after_what_came_before(client, served):
    served.engine.script = always(delta("Hel"), failed("Broken."))
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
    with pytest.raises(openai.APIError, match="Broken") as caught:
        next(stream)
    assert caught.value.code == "internal_error"


def test_overload_is_tried_again_and_a_permanent_failure_is_not(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=2) as client:
        served.engine.script = lambda request: (
            (Overloaded("Full."),) if len(served.engine.requests) == 1 else (delta("x"), stop(), finished())
        )
        assert client.completions.create(model=MODEL, prompt="a").choices[0].text == "x"
        assert len(served.engine.requests) == 2
        served.engine.script = always(EngineFault("Broken."))
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=MODEL, prompt="a")
        assert len(served.engine.requests) == 3


def test_closing_a_stream_early_aborts_it(client, served):
    served.engine.script = always(delta("x"), Wait())
    with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
        next(iter(stream))
    served.engine.wait_until(lambda: len(served.engine.left) == 1)


def test_a_timeout_of_the_client_aborts_too(client, served):
    served.engine.script = always(Wait())
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(model=MODEL, messages=HI)
    served.engine.wait_until(lambda: len(served.engine.left) == 1)


async def test_the_async_client_streams_and_answers_at_once(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def plain() -> str | None:
            return (await client.chat.completions.create(model=MODEL, messages=HI)).choices[0].message.content

        assert await asyncio.gather(*(each() for each in (streamed, plain) * 8)) == ["Hello"] * 16
