"""Every error: its status, its headers, its object, and what it does not reveal."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import httpx
import pytest
from scripted_engine import HEALTHY, always, delta, failed
from server_harness import LIMITS

from penstock.contract.errors import (
    EngineDead,
    EngineFault,
    InvalidParameter,
    NeverFits,
    Overloaded,
    PromptTooLong,
)
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard

JSON = {"content-type": "application/json"}


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> dict:
    """The one shape of all errors."""
    body = response.json()
    assert response.status_code == status, body
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == {4: "invalid_request_error", 5: "server_error"}[status // 100] or status == 429
    assert (error["code"], error["param"]) == (code, param)
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (PromptTooLong(70, 64), 400, "context_length_exceeded", "messages"),
        (NeverFits(9, 8, 16), 400, "kv_cache_exceeded", "max_tokens"),
        (InvalidParameter("priority", "must be 0 under fcfs"), 400, "invalid_value", "priority"),
        (EngineFault("The step failed."), 500, "internal_error", None),
        (EngineDead("The engine is dead."), 503, "engine_dead", None),
        (ValueError("secret prompt"), 500, "internal_error", None),
        (failed(), 500, "internal_error", None),
    ],
)
def test_an_error_before_the_first_output_has_its_own_status_streaming_or_not(
    served, stream, error, status, code, param
):
    served.engine.script = always(error)
    response = served.chat(stream=stream)
    check_error(response, status, code, param)
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_overload_says_when_to_try_again(served, stream):
    served.engine.script = always(Overloaded("The queue is full.", retry_after=7))
    response = served.chat(stream=stream)
    check_error(response, 429, "overloaded")
    assert response.headers["retry-after"] == "7"
    assert "x-should-retry" not in response.headers


def test_a_prompt_that_is_too_long_names_the_endpoints_own_field(served):
    served.engine.script = always(PromptTooLong(70, 64))
    check_error(served.complete(), 400, "context_length_exceeded", "prompt")
    check_error(served.generate(), 400, "context_length_exceeded", "prompt")


def test_another_name_of_a_field_is_used_in_the_engines_errors_too(served):
    served.engine.script = always(NeverFits(9, 8, 16))
    check_error(served.chat(max_completion_tokens=9), 400, "kv_cache_exceeded", "max_completion_tokens")


@pytest.mark.parametrize("endpoint", ["chat", "complete", "generate"])
def test_another_model_is_404_and_none_is_the_served_one(served, endpoint):
    check_error(getattr(served, endpoint)(model="gpt-4o"), 404, "model_not_found", "model")
    assert getattr(served, endpoint)().status_code == 200


def test_the_model_in_answers_is_the_served_name(served):
    assert served.chat(model=None).json()["model"] == "acme/tiny-1"


@pytest.mark.parametrize("path", ["/page", "/v1", "/v1/", "/v2/chat/completions", "/v1/chat/completions/", "/redoc"])
def test_an_unknown_path_is_404(served, path):
    check_error(served.http.get(path), 404, "unknown_url")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/generate")])
def test_a_wrong_method_is_405_and_says_which_are_right(served, method, path):
    response = served.http.request(method, path)
    check_error(response, 405, "method_not_allowed")
    assert response.headers["allow"]


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
def test_a_body_must_be_declared_as_json(served, content_type):
    headers = {"content-type": content_type} if content_type else {}
    check_error(served.http.post("/generate", content=b"{}", headers=headers), 415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8"])
def test_json_may_be_declared_in_other_letters(served, content_type):
    response = served.http.post("/generate", content=b'{"prompt":"x"}', headers={"content-type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b"null", "invalid_json", None),
        (b'{"prompt":"x",}', "invalid_json", None),
        (b'{"prompt":"\xff"}', "invalid_json", None),
        (b'\xef\xbb\xbf{"prompt":"x"}', "invalid_json", None),
        (b'{"prompt":"x","top_p":' + b"[" * 5000 + b"]" * 5000 + b"}", "invalid_json", None),
        (b'{"prompt":"x","temperature":NaN}', "invalid_value", "temperature"),
        (b'{"prompt":"x","temperature":-Infinity}', "invalid_value", "temperature"),
        (b'{"prompt":"x","temperature":1e999}', "invalid_value", "temperature"),
        (b'{"prompt":"x","seed":' + b"9" * 10000 + b"}", "invalid_value", "seed"),
        (b'{"prompt":"x","seed":-' + b"9" * 10000 + b"}", "invalid_value", "seed"),
        (b'{"prompt":["x","\\ud800"]}', "invalid_value", "prompt.1"),
        (b'{"prompt":"x","prompt":"y"}', "duplicate_key", "prompt"),
        (b'{"\\ud800":"x","\\ud800":"y"}', "duplicate_key", "?"),
        (b'{"metadata":{"\\ud800":"x"}}', "invalid_value", "metadata"),
    ],
)
def test_a_body_that_is_not_strict_json_is_400(served, body, code, param):
    check_error(served.http.post("/generate", content=body, headers=JSON), 400, code, param)


def test_the_whole_range_of_64_bits_is_read(served):
    for seed in (-(2**63), 2**63 - 1):
        assert served.generate(seed=seed).status_code == 200
        assert served.request.sampling.get("seed", 0) == seed


def test_nesting_that_python_can_read_is_bounded_all_the_same(served):
    body = b'{"prompt":"x","top_p":' + b"[" * 100 + b"]" * 100 + b"}"
    response = served.http.post("/generate", content=body, headers=JSON)
    assert "levels deep" in check_error(response, 400, "invalid_value", "top_p" + ".0" * 64)["message"]


def test_a_body_that_declares_too_many_bytes_is_413(served):
    response = served.http.post("/generate", content=b" " * (LIMITS.max_body_bytes + 1), headers=JSON)
    check_error(response, 413, "request_too_large")
    assert response.headers["connection"] == "close"


def test_a_body_that_declares_no_length_is_counted(served):
    def pieces():
        for _ in range(LIMITS.max_body_bytes // 1024 + 1):
            yield b" " * 1024

    check_error(served.http.post("/generate", content=pieces(), headers=JSON), 413, "request_too_large")


def test_a_body_of_just_the_limit_is_read(served):
    body = b'{"prompt":"x"}'.ljust(LIMITS.max_body_bytes)
    assert served.http.post("/generate", content=body, headers=JSON).status_code == 200


def raw_exchange(port: int, request: bytes) -> bytes:
    """Send bytes as they are, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_a_length_that_promises_too_much_is_413_before_the_body_came(served):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 99999999\r\n\r\n"
    assert raw_exchange(served.port, head + b"{").startswith(b"HTTP/1.1 413 ")


def test_a_length_that_promises_too_little_ends_the_body_there(served):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 5\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    answer = raw_exchange(served.port, head + b'{"prompt":"x"}')
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_json"' in answer
    assert not served.engine.requests


def test_a_body_that_does_not_come_is_408(served, monkeypatch):
    monkeypatch.setattr("penstock.server.http.body.DEADLINE_SECONDS", 0.1)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    answer = raw_exchange(served.port, head + b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def test_where_there_is_get_there_is_head(served):
    paths = [path for path, methods in served.http.get("/openapi.json").json()["paths"].items() if "get" in methods]
    for path in ["/", "/page/app.js", "/engine/events", *paths]:
        path = path.replace("{model_id}", "acme/tiny-1").replace("{response_id}", "resp_1")
        head = served.http.head(path)
        assert head.content == b""
        if path == "/engine/events":  # which would not end
            assert (head.status_code, head.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
            continue
        get = served.http.get(path)
        assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])


def test_a_head_request_is_refused_without_a_body_and_the_connection_lives(served):
    response = served.http.head("/v1/completions")
    assert (response.status_code, response.content) == (405, b"")
    assert served.http.get("/health").status_code == 200


def test_a_wrong_method_is_told_every_right_one_of_the_path(served):
    answer = served.http.post("/v1/responses/resp_1")
    assert answer.headers["allow"] == "DELETE, GET, HEAD"
    assert "this endpoint takes DELETE, GET, HEAD" in answer.json()["error"]["message"]
    assert served.http.post("/v1/nothing", json={}).status_code == 404


def test_a_client_that_leaves_within_its_body_asks_nothing(served, caplog):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(head + b'{"prompt"')
    assert served.generate().status_code == 200
    assert len(served.engine.requests) == 1
    assert not caplog.records


def test_messages_hold_nothing_of_the_body_and_logs_nothing_of_the_prompt(served, caplog):
    caplog.set_level(logging.DEBUG)
    served.engine.script = always(delta("secret answer"), ValueError("secret prompt"))
    texts = [
        served.chat(messages=[{"role": "user", "content": {"secret": 1}}]).text,
        served.chat(messages=[{"role": "user", "content": "secret prompt"}]).text,
        served.chat(tools=[{"type": "secret", "function": {"name": "secret"}}]).text,
        served.chat(stop=[{"secret": 1}]).text,
        served.http.post("/generate", content=b'{"prompt": secret', headers=JSON).text,
    ]
    assert not any("secret" in text for text in texts)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("penstock", "uvicorn"))]
    assert any("ValueError" in message for message in ours)
    assert not any("secret" in message for message in ours)


def test_a_good_request_id_comes_back_and_a_bad_one_is_replaced(served):
    def answered(sent: str) -> str:
        return served.http.get("/health", headers={"x-request-id": sent}).headers["x-request-id"]

    assert answered("my.request-1_A") == "my.request-1_A"
    assert answered("x" * 64) == "x" * 64
    for bad in ("x" * 65, "a b", "a/b"):
        assert answered(bad).startswith("req-")
    assert answered("a b") != answered("a b")


def test_health_says_what_the_engine_is_doing(served):
    response = served.http.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "reason": "",
        "running": 1,
        "waiting": 2,
        "free_blocks": 30,
        "total_blocks": 40,
        "steps": 9,
        "model_loaded": True,
        "engine_ready": True,
    }


def test_a_dead_engine_is_503_with_the_reason(served):
    served.engine.state = replace(HEALTHY, alive=False, reason="out of memory", running=0, waiting=0, free_blocks=0)
    response = served.http.get("/health")
    check_error(response, 503, "engine_dead")
    assert response.json()["reason"] == "out of memory"
    assert response.json()["status"] == "dead"
    assert response.json()["engine_ready"] is False


def test_models_are_listed_and_found_by_names_with_slashes(served):
    model = served.http.get("/v1/models/acme/tiny-1").json()
    assert model == {
        "id": "acme/tiny-1",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "penstock",
        "root": "acme/tiny-1",
        "parent": None,
        "max_model_len": 64,
        "default_sampling_params": {},
    }
    assert served.http.get("/v1/models/acme%2Ftiny-1").json() == model
    assert served.http.get("/v1/models").json() == {"object": "list", "data": [model]}
    check_error(served.http.get("/v1/models/acme/tiny-2"), 404, "model_not_found", "model")


def test_a_model_without_a_template_says_where_to_go():
    from penstock.server.openai.chat import parse_chat

    card = ModelCard("base", 0, 64, 100, has_chat_template=False)
    with pytest.raises(InvalidParameter, match="/v1/completions"):
        parse_chat({"messages": [{"role": "user", "content": "Hi"}]}, "id", card, DEFAULT_LIMITS)


def test_the_connection_survives_a_refusal(served):
    for _ in range(3):
        assert served.chat(n=0).status_code == 400
    assert served.chat().status_code == 200
