"""What clients send that other servers take: accepted where it means something, left out where it may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from scripted_engine import ScriptedEngine, delta, failed, finished, stop
from server_harness import CARD, running

from penstock.contract.events import ChoiceFinished, FinishReason, PromptTokens, TokenPiece
from penstock.server.http.access import Access

HI = [{"role": "user", "content": "Hi"}]
NAMED = [{"role": "user", "content": "Hi", "name": "Ada"}]
PROMPT = PromptTokens("Hi", (TokenPiece(5, b"H", float("nan")), TokenPiece(6, b"i", -2.0)))


@pytest.fixture
def lenient() -> Iterator[httpx.Client]:
    with running(ScriptedEngine(), access=Access(compat=True)) as url, httpx.Client(base_url=url) as http:
        yield http


def test_a_name_that_the_template_has_no_place_for_is_refused_by_its_place(served):
    answer = served.http.post("/v1/chat/completions", json={"messages": NAMED})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (
        "messages.0.name",
        "unsupported_parameter",
    )


def test_with_compat_it_is_left_out_and_listed(lenient):
    answer = lenient.post("/v1/chat/completions", json={"messages": NAMED})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-params"] == "messages.0.name"


def test_a_name_reaches_a_template_that_has_a_place_for_it():
    engine, card = ScriptedEngine(), replace(CARD, named_roles=frozenset({"user"}))
    with running(engine, card=card, access=Access(compat=True)) as url, httpx.Client(base_url=url) as http:
        messages = [*NAMED, {"role": "assistant", "content": "Yes?", "name": "Bob"}, *HI]
        answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.headers["x-ignored-params"] == "messages.1.name"
    assert [message.name for message in engine.requests[-1].prompt.messages] == ["Ada", "", ""]


def test_many_stop_strings_are_taken(served):
    texts = tuple(f"stop{number}" for number in range(20))
    assert served.chat(stop=list(texts)).status_code == 200
    assert served.request.stop.strings == texts
    assert served.chat(stop=["x"] * 65).json()["error"]["param"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 5.0, "seed": 7.0, "top_k": 3.0, "n": 1.0}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 5.0, "stop_token_ids": [3.0], "logprobs": 0.0}),
        ("/v1/completions", {"prompt": [5.0, 6.0], "max_tokens": 5.0}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5.0, "top_k": 3.0}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 5.0}),
        ("/generate", {"prompt": "Hi", "max_tokens": 5.0}),
    ],
)
def test_an_integer_may_be_written_with_a_point(served, path, body):
    answer = served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert served.request.stop.max_tokens == 5
    for value in (served.request.stop.max_tokens, *served.request.stop.token_ids):
        assert type(value) is int


@pytest.mark.parametrize("value", [5.5, True, "5", 1e300])
def test_what_is_no_integer_is_refused_still(served, value):
    assert served.complete(max_tokens=value).json()["error"]["param"] == "max_tokens"
    assert served.http.post("/v1/embeddings", json={"input": "x", "dimensions": value}).status_code == 400


def test_an_anthropic_client_may_ask_for_more_than_the_context_holds(served):
    answer = served.http.post("/v1/messages", json={"messages": HI, "max_tokens": 32_000})
    assert answer.status_code == 200
    assert served.request.stop.max_tokens == CARD.max_model_len


def script_of_prompts(request):
    if request.echo or request.sampling.has("prompt_logprobs"):
        yield PROMPT
    for choice in range(request.n):
        yield from (delta("!", choice), stop(choice))
    yield finished(prompt=2, completion=request.n)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_generating(served, stream):
    served.engine.script = script_of_prompts
    answer = served.complete(max_tokens=0, echo=True, logprobs=0, stream=stream, n=2)
    assert answer.status_code == 200
    assert "!" not in answer.text
    if stream:
        assert answer.text.count('"finish_reason":"length"') == 2
        return
    assert [choice["text"] for choice in answer.json()["choices"]] == ["Hi", "Hi"]
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [None, -2.0]
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
    assert answer.json()["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 0,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_nothing_at_all_may_be_asked_for(served):
    answer = served.complete(max_tokens=0).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert served.complete(max_tokens=0, min_tokens=3).status_code == 400
    assert served.chat(max_tokens=0).status_code == 400


def test_scoring_that_fails_or_is_aborted_is_no_success(served):
    served.engine.script = lambda _: (PROMPT, failed())
    assert served.complete(max_tokens=0, echo=True).status_code == 500
    served.engine.script = lambda _: (PROMPT, ChoiceFinished(0, FinishReason.ABORT), finished())
    assert served.complete(max_tokens=0, echo=True).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "continued"), [("/v1/chat/completions", False), ("/v1/messages", True), ("/v1/responses", False)]
)
def test_a_conversation_may_end_with_two_turns_of_the_assistant(served, path, continued):
    turns = [*HI, {"role": "assistant", "content": "One,"}, {"role": "assistant", "content": "two"}]
    body = {"input": turns} if path == "/v1/responses" else {"messages": turns, "max_tokens": 5}
    assert served.http.post(path, json=body).status_code == 200
    assert [message.content for message in served.request.prompt.messages] == ["Hi", "One,", "two"]
    assert served.request.prompt.continue_final_message is continued


HINTS = {
    "reasoning_effort": "high",
    "verbosity": "low",
    "prompt_cache_key": "k",
    "service_tier": "flex",
    "store": False,
}


def test_hints_that_change_nothing_are_no_error(served):
    assert served.chat(**HINTS).status_code == 200
    hints = {
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
    }
    answer = served.http.post("/v1/responses", json={"input": "Hi", "store": False} | hints)
    assert answer.status_code == 200, answer.text
    config = {"output_config": {"effort": "high"}}
    assert served.http.post("/v1/messages", json={"messages": HI, "max_tokens": 5} | config).status_code == 200


@pytest.mark.parametrize("name", [name for name in HINTS if name != "store"])
def test_a_hint_is_checked_all_the_same(served, lenient, name):
    assert served.chat(**{name: 7}).json()["error"]["param"] == name
    if name != "reasoning_effort":
        answer = lenient.post("/v1/chat/completions", json={"messages": HI, name: 7})
        assert answer.headers["x-ignored-params"] == name


def test_a_value_that_asks_for_nothing_can_be_read(served):
    assert 'send "" or null' in served.complete(suffix="x").json()["error"]["message"]
