"""The official Anthropic client against the default command: whole and streamed messages, counts, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import openai
import pytest
from conformance_harness import MODEL, PARIS

pytestmark = pytest.mark.model

SEA = [{"role": "user", "content": [{"type": "text", "text": "Two words about the sea 🌊, please."}]}]
TURNS = [*PARIS, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]
CASES = {
    "text": {"messages": SEA, "max_tokens": 24},
    "limit": {"messages": PARIS, "max_tokens": 3},
    "system": {"messages": PARIS, "max_tokens": 16, "system": "Answer in one word."},
    "system parts": {"messages": PARIS, "max_tokens": 8, "system": [{"type": "text", "text": "Be brief."}]},
    "stop": {"messages": PARIS, "max_tokens": 24, "stop_sequences": ["is Par", "zzz"]},
    "turns": {"messages": TURNS, "max_tokens": 16},
}
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(default_server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=default_server.url, api_key="none", max_retries=0, timeout=240) as client:
        yield client


def said(message) -> tuple:
    text = b"".join(block.text.encode() for block in message.content)
    used = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    return message.role, text, message.stop_reason, message.stop_sequence, used, message.usage.output_tokens


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_message_is_the_whole_one_byte_for_byte(client, case):
    whole = client.messages.create(model=MODEL, **CASES[case], **GREEDY)
    with client.messages.stream(model=MODEL, **CASES[case], **GREEDY) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said(final) == said(whole)
    assert pieces.encode() == said(whole)[1]


def test_the_events_come_in_anthropics_order(client):
    events = list(client.messages.create(model=MODEL, max_tokens=6, messages=PARIS, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0].message.content == []
    assert events[-2].usage.output_tokens == 6


def test_each_end_has_anthropics_name(client):
    ends = {case: client.messages.create(model=MODEL, **CASES[case], **GREEDY) for case in ("limit", "stop", "turns")}
    assert ends["limit"].stop_reason == "max_tokens"
    assert (ends["stop"].stop_reason, ends["stop"].stop_sequence) == ("stop_sequence", "is Par")
    assert ends["turns"].stop_reason in ("end_turn", "max_tokens")


def test_counts_are_those_of_the_answer_and_of_openais_dialect(client, default_server):
    for case in ("text", "system", "turns"):
        fields = {name: value for name, value in CASES[case].items() if name in ("messages", "system")}
        counted = client.messages.count_tokens(model=MODEL, **fields).input_tokens
        assert counted == said(client.messages.create(model=MODEL, max_tokens=1, **fields))[4]
    with openai.OpenAI(base_url=default_server.url + "/v1", api_key="none") as other:
        answer = other.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=1)
    assert answer.usage.prompt_tokens == counted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "raised", "kind", "named"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
        ({"temperature": 9e9}, anthropic.BadRequestError, "invalid_request_error", "temperature"),
        ({"surprise": 1}, anthropic.BadRequestError, "invalid_request_error", "surprise"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        ({"model": "another"}, anthropic.NotFoundError, "not_found_error", "another"),
    ],
)
def test_a_mistake_is_the_clients_own_error_before_any_answer(client, stream, fields, raised, kind, named):
    with pytest.raises(raised, match=named) as caught:
        client.messages.create(model=MODEL, max_tokens=4, messages=PARIS, stream=stream, extra_body=fields)
    assert set(caught.value.body) >= {"type", "error"}
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind


def test_a_count_of_nothing_is_refused(client):
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.count_tokens(model=MODEL, messages=[])


async def test_the_async_client_gets_the_same_from_a_shared_batch(client, default_server):
    alone = [said(client.messages.create(model=MODEL, **fields, **GREEDY)) for fields in CASES.values()]
    async with anthropic.AsyncAnthropic(base_url=default_server.url, api_key="none", timeout=240) as clients:

        async def streamed(fields) -> tuple:
            async with clients.messages.stream(model=MODEL, **fields, **GREEDY) as stream:
                return said(await stream.get_final_message())

        assert await asyncio.gather(*map(streamed, CASES.values())) == alone
