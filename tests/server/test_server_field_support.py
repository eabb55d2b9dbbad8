"""No field is silently ignored: held against the request types of the official clients, and against behaviour."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from scripted_engine import ScriptedEngine
from server_harness import CARD, LIMITS, running
from sse_reader import read_events

from penstock.contract.errors import InvalidParameter, RequestError
from penstock.server.anthropic.messages_request import parse_count, parse_messages
from penstock.server.field_support import ENDPOINTS, field_support, table
from penstock.server.http.access import Access
from penstock.server.openai.chat import parse_chat
from penstock.server.openai.completions import parse_completion
from penstock.server.openai.embeddings import parse_embeddings
from penstock.server.openai.generate import parse_generate
from penstock.server.openai.responses_request import parse_response
from penstock.server.openai.scoring import parse_rerank, parse_score
from penstock.server.tokens.apply_template import parse_template
from penstock.server.tokens.tokenize import parse_tokenize

ROOT = Path(__file__).resolve().parents[2]
HI = [{"role": "user", "content": "Hi"}]

TYPES = {
    "/v1/chat/completions": chat_params.CompletionCreateParamsStreaming,
    "/v1/completions": completion_params.CompletionCreateParamsStreaming,
    "/v1/embeddings": embedding_params.EmbeddingCreateParams,
    "/v1/responses": response_create_params.ResponseCreateParamsStreaming,
    "/v1/messages": message_create_params.MessageCreateParamsStreaming,
    "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
}
BODIES: dict[str, dict] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/generate": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/apply-template": {"messages": HI},
}
PARSERS: dict[str, Callable[[dict], object]] = {
    "/v1/chat/completions": lambda body: parse_chat(body, "id", CARD, LIMITS),
    "/v1/completions": lambda body: parse_completion(body, "id", CARD, LIMITS),
    "/v1/embeddings": lambda body: parse_embeddings(body, "id", CARD, LIMITS),
    "/v1/responses": lambda body: parse_response(body, "id", CARD, LIMITS, lambda _: ()),
    "/v1/score": lambda body: parse_score(body, "id", CARD, LIMITS),
    "/v1/rerank": lambda body: parse_rerank(body, "id", CARD, LIMITS),
    "/v1/messages": lambda body: parse_messages(body, "id", CARD, LIMITS),
    "/v1/messages/count_tokens": lambda body: parse_count(body, CARD, LIMITS),
    "/generate": lambda body: parse_generate(body, "id", CARD, LIMITS),
    "/tokenize": lambda body: parse_tokenize(body, CARD, LIMITS),
    "/apply-template": lambda body: parse_template(body, CARD, LIMITS),
}
NONSENSE = ([{"nobody": "asked"}], {"nobody": {"asked": 1}}, "nobody asked", -7.25)


def names_of(kind: type) -> set[str]:
    return set(typing.get_type_hints(kind, sys.modules[kind.__module__].__dict__)) | {
        name for base in getattr(kind, "__orig_bases__", ()) if isinstance(base, type) for name in names_of(base)
    }


def refusals(endpoint: str, field: str) -> list[RequestError]:
    """The errors that nonsense in a field causes, each of which must name the field."""
    found = []
    for value in NONSENSE:
        try:
            PARSERS[endpoint](BODIES[endpoint] | {field: value})
        except RequestError as error:
            found.append(error)
    assert {error.param.split(".")[0] for error in found} <= {field}
    return found


@pytest.mark.parametrize("endpoint", TYPES)
def test_every_field_of_the_official_clients_is_listed(endpoint):
    listed = {row.field for row in field_support(endpoint)}
    assert names_of(TYPES[endpoint]) >= {"model"}
    assert names_of(TYPES[endpoint]) - listed == set()


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_count_of_silently_ignored_fields_is_0(endpoint):
    names = {row.field for row in field_support(endpoint)} | (names_of(TYPES[endpoint]) if endpoint in TYPES else set())
    ignored = [name for name in sorted(names | {"surprise"}) if not refusals(endpoint, name)]
    assert ignored == []


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_is_not_honoured_is_refused_at_every_value_but_those_that_ask_for_nothing(endpoint):
    for row in field_support(endpoint):
        if row.honoured or row.hint:
            continue
        errors = refusals(endpoint, row.field)
        assert len(errors) == len(NONSENSE), row.field
        assert {error.code for error in errors} == {"unsupported_parameter"}, row.field
        for value in (*row.accepted, None):
            PARSERS[endpoint](BODIES[endpoint] | {row.field: value})


def test_the_page_in_the_docs_is_what_the_code_says():
    assert (ROOT / "docs/api-fields.md").read_text(encoding="utf-8") == table()


def test_every_route_that_takes_a_body_is_in_the_table(served):
    paths = served.http.get("/openapi.json").json()["paths"]
    taking = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert taking == set(ENDPOINTS)


@pytest.fixture(scope="module")
def lenient():
    with running(ScriptedEngine(), access=Access(compat=True)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("endpoint", BODIES)
def test_with_compat_what_would_be_refused_is_left_out_and_listed(lenient, endpoint):
    unsupported = [row.field for row in field_support(endpoint) if not (row.honoured or row.hint)]
    body = BODIES[endpoint] | dict.fromkeys(unsupported, "nonsense") | {"surprise": 1, "ü, x\n": 2}
    answer = lenient.post(endpoint, json=body)
    assert answer.status_code == 200, answer.text
    listed = answer.headers["x-ignored-params"].split(", ")
    assert sorted(listed) == sorted([*unsupported, "surprise", "%C3%BC%2C%20x%3F"])
    plain = lenient.post(endpoint, json=BODIES[endpoint])
    assert "x-ignored-params" not in plain.headers


def test_with_compat_streams_tell_too_and_nested_fields_by_their_path(lenient):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}], "weight": 1}]
    answer = lenient.post("/v1/chat/completions", json={"messages": messages, "stream": True})
    assert answer.headers["x-ignored-params"] == "messages.0.weight, messages.0.content.0.x"
    assert read_events(answer.content)[-1].data == "[DONE]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HI, "temperature": "hot"}, "temperature"),
        ({"messages": HI, "temperature": 9}, "temperature"),
        ({"surprise": 1}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": HI} | {f"x{index}": 1 for index in range(200)}, "x128"),
    ],
)
def test_with_compat_a_wrong_value_and_lost_content_are_errors_still(lenient, body, param):
    answer = lenient.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_role_that_is_not_supported_is_never_left_out(lenient):
    messages = [*HI, {"role": "narrator", "content": "x"}]
    answer = lenient.post("/v1/chat/completions", json={"messages": messages})
    assert answer.json()["error"]["param"] == "messages.1.role"
    with pytest.raises(InvalidParameter):
        parse_chat({"messages": messages}, "id", CARD, LIMITS)
