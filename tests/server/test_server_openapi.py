"""The OpenAPI document says what the server does."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from jsonschema import Draft202012Validator
from scripted_engine import ScriptedEngine
from server_harness import CARD, running

from penstock.server.openai.chat import CHAT_FIELDS, NEUTRAL_CHAT


@pytest.fixture
def document(served) -> dict:
    return served.http.get("/openapi.json").json()


def resolve(document: dict, schema: dict) -> dict:
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    return document["components"]["schemas"][name] if name else schema


def check(document: dict, schema: dict, value: object, path: str = "") -> None:
    """Check a value against the part of JSON Schema that the document uses, strictly: every key must be described."""
    schema = resolve(document, schema)
    if "anyOf" in schema:
        schema = schema["anyOf"][1 if value is None else 0]
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": float,
        "boolean": bool,
        "null": type(None),
    }
    kind = schema["type"]
    allowed = tuple(kinds[each] for each in (kind if isinstance(kind, list) else [kind]))
    assert isinstance(value, allowed), path
    assert value in schema.get("enum", [value]), path
    assert value == schema.get("const", value), path
    if isinstance(value, dict):
        assert set(schema["required"]) <= set(value) <= set(schema["properties"]), path
        for key, item in value.items():
            check(document, schema["properties"][key], item, f"{path}.{key}")
    if isinstance(value, list):
        for item in value:
            check(document, schema["items"], item, f"{path}[]")


def schema_of(document: dict, method: str, path: str, status: str) -> dict:
    return document["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]


def test_answers_are_as_described(served, document):
    for call, path in (
        (served.chat, "/v1/chat/completions"),
        (served.complete, "/v1/completions"),
        (served.generate, "/generate"),
    ):
        check(document, schema_of(document, "post", path, "200"), call().json(), path)
        check(document, schema_of(document, "post", path, "400"), call(n=-1).json(), path)
    check(document, schema_of(document, "post", "/v1/chat/completions", "200"), served.chat(logprobs=True).json())
    check(document, schema_of(document, "post", "/v1/completions", "200"), served.complete(logprobs=0).json())
    for path in ("/v1/models", "/health", "/stats"):
        check(document, schema_of(document, "get", path, "200"), served.http.get(path).json(), path)


def test_every_reference_resolves_and_every_route_is_there(document):
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/chat/completions/{completion_id}",
        "/v1/chat/completions/{completion_id}/messages",
        "/v1/score",
        "/v1/rerank",
        "/v1/responses/input_tokens",
        "/v1/responses/compact",
        "/v1/responses/{response_id}/input_items",
        "/v1/completions",
        "/v1/embeddings",
        "/generate",
        "/v1/models",
        "/v1/models/{model_id}",
        "/health",
        "/stats",
        "/health/live",
        "/health/ready",
        "/tokenize",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/detokenize",
        "/apply-template",
        "/version",
        "/model_info",
        "/server_info",
        "/abort_requests",
        "/v1/requests/{request_id}/latency",
        "/v1/requests/{request_id}/steps",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/metrics",
        "/engine/sampling",
        "/engine/steps",
        "/engine/prefixes",
        "/engine/tenants",
    }
    names = set(document["components"]["schemas"])

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in names
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(document)


def test_no_answer_is_described_that_is_never_given(document):
    statuses = {s for path in document["paths"].values() for op in path.values() for s in op["responses"]}
    assert statuses == {
        *("200", "400", "401", "403", "404", "408", "413", "415", "429", "431", "500", "503", "504"),
    }


def test_requests_are_described_field_by_field_and_closed(document):
    content = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    assert set(schema["properties"]) == {field.name for field in CHAT_FIELDS} | set(NEUTRAL_CHAT)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["messages"]
    assert schema["properties"]["length_penalty"]["enum"] == [1, None]
    temperature = schema["properties"]["temperature"]
    assert temperature["default"] == 1.0
    assert {"type": "number", "minimum": 0.0, "maximum": 2.0} in temperature["anyOf"]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
HI = {"role": "user", "content": "Hi"}
LOOK = {"name": "look", "input_schema": {"type": "object"}}
CALLED, USED = {"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": [USE]}


def chat(*messages: dict, **more: object) -> tuple[str, dict]:
    return "/v1/chat/completions", {"messages": list(messages)} | more


def turns(*messages: dict, **more: object) -> tuple[str, dict]:
    return "/v1/messages", {"messages": list(messages), "max_tokens": 5} | more


def accepted(served, document: dict, path: str, body: dict) -> tuple[bool, bool]:
    """Whether the document allows the body, and whether the server does."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {"model": CARD.name} | body
    return Draft202012Validator(schema).is_valid(body), served.http.post(path, json=body).status_code == 200


def test_a_document_tells_how_its_model_can_be_told_to_think():
    card = replace(CARD, thinks=True, template_variables=frozenset({"enable_thinking", "reasoning_effort"}))
    with running(ScriptedEngine(), card=card) as url, httpx.Client(base_url=url) as http:
        document = http.get("/openapi.json").json()

        def allowed(path: str, **fields: object) -> bool:
            schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            body = {"messages": [HI], "max_tokens": 9, "model": card.name} | fields
            valid = Draft202012Validator(schema).is_valid(body)
            assert valid == (http.post(path, json=body).status_code == 200)
            return valid

        assert allowed("/v1/messages", thinking={"type": "enabled", "budget_tokens": 4})
        assert allowed("/v1/messages", output_config={"effort": "high"})
        assert allowed("/v1/chat/completions", reasoning_effort="high")
        assert not allowed("/v1/messages", thinking={"type": "enabled", "budget_tokens": 0})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        chat(HI),
        chat(HI | {"name": None, "tool_calls": None, "reasoning": None}, max_tokens=None),
        chat(HI, CALLED, {"role": "tool", "content": "1", "tool_call_id": "a"}),
        chat(HI, CALLED | {"content": None, "reasoning": "hm"}, HI),
        turns(HI, system=None),
        turns(HI, USED, {"role": "user", "content": [RESULT, {"type": "text", "text": "Well?"}]}),
        turns(HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, USE]}, HI),
        ("/tokenize", {"prompt": "Hi", "messages": None}),
        chat(HI, CALLED | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": ' {"a": "}\\n"} '}}]}),
        chat(HI, CALLED | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": " "}}]}),
        chat(HI, max_tokens=64, reasoning_effort="none"),
        chat(HI, reasoning_effort="low", verbosity="low", service_tier="flex", prompt_cache_key="k"),
        turns(HI, output_config={"effort": "low"}),
        turns(HI, max_tokens=65),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
        ("/v1/responses", {"input": "Hi", "include": ["reasoning.encrypted_content"]}),
        turns(HI, tools=[LOOK], tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True}),
        turns(HI, tools=[LOOK], tool_choice={"type": "any", "name": None}),
        ("/v1/completions", {"prompt": [[1, 99], [2]], "thinking_token_budget": None, "allowed_token_ids": [99]}),
        ("/v1/embeddings", {"input": ["a", "b"], "dimensions": 2, "truncate_prompt_tokens": -1}),
        turns(HI, thinking={"type": "adaptive", "budget_tokens": None, "display": "omitted"}),
    ],
)
def test_what_the_document_allows_is_accepted(served, document, path, body):
    assert accepted(served, document, path, body) == (True, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": None}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/embeddings", {"input": None}),
        ("/v1/responses", {"input": None}),
        ("/detokenize", {"tokens": None}),
        ("/abort_requests", {"request_ids": None}),
        chat({"role": "user"}),
        chat({"role": "user", "content": None}),
        chat({"role": "assistant"}),
        chat({"role": "assistant", "content": None, "tool_calls": []}),
        chat(HI | {"tool_calls": [CALL]}),
        chat(HI | {"reasoning_content": "hm"}),
        chat(HI, CALLED, {"role": "tool", "content": "1"}),
        chat(HI, CALLED, {"role": "tool", "tool_call_id": "a"}),
        chat({"role": "assistant", "content": "Hi", "tool_call_id": "a"}),
        turns(HI, max_tokens=None),
        turns({"role": "user", "content": [USE]}),
        turns(HI, {"role": "assistant", "content": [RESULT]}),
        turns({"role": "system", "content": [RESULT]}),
        turns({"role": "user", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}),
        chat(HI, CALLED | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": "x"}}]}),
        chat(HI, max_tokens=65),
        chat(HI, max_completion_tokens=0),
        chat(HI, reasoning_effort="lots"),
        chat(HI, verbosity="lots"),
        chat(HI, model="other"),
        turns(HI, max_tokens=0),
        turns(HI, thinking={"type": "enabled"}),
        turns(HI, thinking={"type": "adaptive", "budget_tokens": 9}),
        turns(HI, tools=[LOOK], tool_choice={"type": "tool"}),
        turns(HI, tools=[LOOK], tool_choice={"type": "auto", "name": "look"}),
        turns(HI, output_config={"effort": "lots"}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 0}),
        ("/v1/completions", {"prompt": [1, 100]}),
        ("/v1/completions", {"prompt": ["a", [1]]}),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": 1}),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}),
        ("/detokenize", {"tokens": [100]}),
        ("/v1/responses", {"input": "Hi", "include": ["file_search_call.results"]}),
    ],
)
def test_what_the_document_forbids_is_refused(served, document, path, body):
    assert accepted(served, document, path, body) == (False, False)


def test_the_document_is_a_page_too_that_fetches_nothing(served, document):
    answer = served.http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in document["paths"]:
        assert f"<code>{path}</code>" in answer.text
    for field in CHAT_FIELDS:
        assert f"<td>{field.name}" in answer.text
    assert not [
        part
        for part in ("<script", "<link", "<img", "src=", "@import", "url(", "http:", "https:")
        if part in answer.text
    ]
