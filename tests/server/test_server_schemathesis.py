"""Requests made from our own OpenAPI document, right and wrong ones: no 5xx, no hang, every error an error object.

In front of a scripted engine, where any answer can come, and of the real engine, text and scheduler around a fake
runner, where what the routes let through must be refused or served by the engine's intake.
"""

from __future__ import annotations

from collections import Counter

import pytest
import requests
from conformance_harness import UNHURRIED, gated
from scripted_engine import HELLO, ScriptedEngine, delta, finished, stop
from server_harness import CARD, running

from penstock.contract.events import PromptTokens, TokenPiece
from penstock.server.field_support import ENDPOINTS

pytestmark = pytest.mark.deep

EXAMPLES = 200
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
SECONDS = 60.0  # far more than any answer takes, but a hang is found
WITH_BODY = frozenset(ENDPOINTS)
ANSWERED = {
    "POST /v1/chat/completions": EXAMPLES // 5,
    "POST /v1/completions": 1,
    "POST /v1/messages": EXAMPLES // 5,
    "POST /v1/messages/count_tokens": EXAMPLES // 5,
    "POST /v1/responses": 1,
    "POST /generate": 1,
    "GET /metrics": 1,
}
"""How many valid requests must be answered at least; the others break rules that no schema can express."""


def every_choice(request):
    """An answer with as many choices as were asked for, the prompt first where it is asked for; or a vector."""
    if request.embedding is not None:
        yield from HELLO(request)
        return
    if request.echo or request.sampling.has("prompt_logprobs"):
        yield PromptTokens("Hi", (TokenPiece(5, b"H", float("nan")), TokenPiece(6, b"i", -2.0)))
    for choice in range(request.n):
        yield from (delta("Hi", choice), stop(choice))
    yield finished()


@pytest.fixture(params=["scripted", "real"])
def url(request):
    if request.param == "scripted":
        with running(ScriptedEngine(script=every_choice), card=CARD, server_limits=UNHURRIED) as url:
            yield url
    else:
        with gated(max_model_len=64, max_queued=1024) as server:
            server.gate.open()
            yield server.url
            assert server.loop.health().alive


@pytest.mark.filterwarnings("ignore")  # the tool's own warnings, about schemas it finds unusual and its dependencies
def test_every_operation_answers_whatever_is_sent(url, capsys):
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(_document(url))
    schema.config.update(base_url=url)
    tried: dict[str, Counter[str]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        seen = tried[f"{operation.method.upper()} {operation.path}"] = Counter()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _send_examples(operation, mode, seen)
    with capsys.disabled():
        for name, seen in tried.items():
            print(f"\n{name}: {dict(sorted(seen.items()))}", end="")
    assert {name: seen for name, seen in tried.items() if seen["positive 2xx"] < ANSWERED.get(name, 0)} == {}
    few = {
        (name, mode): seen
        for name, seen in tried.items()
        for mode in ("positive", "negative")
        if name.removeprefix("POST ") in WITH_BODY
        and sum(count for kind, count in seen.items() if kind.startswith(mode)) < EXAMPLES
    }
    assert few == {}


def _document(url: str) -> dict:
    """The server's document, with the one model's name: any other is refused before the rest of a body is read."""
    document = requests.get(f"{url}/openapi.json", timeout=SECONDS).json()
    [model] = requests.get(f"{url}/v1/models", timeout=SECONDS).json()["data"]
    for path in document["paths"].values():
        for operation in path.values():
            if "requestBody" in operation:
                properties = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
                properties |= {"model": {"enum": [model["id"]]}} if "model" in properties else {}
    return document


def _send_examples(operation, mode, seen: Counter[str]) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = _meant(case.body)
        response = case.call(timeout=SECONDS)
        seen[f"{mode.value} {response.status_code // 100}xx"] += 1
        _check(response, case.path)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # an operation without parameters has nothing that could be wrong


def _meant(body: object) -> object:
    """A valid body, mended where a JSON schema cannot tell: which calls and tools exist, and that 2.0 is 2 here."""
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        made: list[str] = []
        body = body | {"messages": [_of_calls(turn, made) for turn in body["messages"]]}
        if not body.get("tools") or (isinstance(body.get("tool_choice"), dict) and body["tool_choice"].get("name")):
            body.pop("tool_choice", None)
    return _with_integers(body)


def _of_calls(turn: dict, made: list[str]) -> dict:
    """The turn, its results tied to a call made before or turned into plain text; its own calls are added to `made`."""
    if turn["role"] == "tool":
        known = {"tool_call_id": made[0]} if made else {"role": "user", "tool_call_id": None}
        turn = turn | known | {"name": None}
    blocks = turn.get("content")
    if isinstance(blocks, list):
        blocks = [_of_call(block, made) for block in blocks]
        turn = turn | {"content": blocks}
        made += [block["id"] for block in blocks if block["type"] == "tool_use"]
    for call in turn.get("tool_calls") or []:
        call["function"]["arguments"] = "{}"
        made.append(call["id"])
    return turn


def _of_call(block: dict, made: list[str]) -> dict:
    if block["type"] != "tool_result":
        return block
    return block | {"tool_use_id": made[0]} if made else {"type": "text", "text": "No result."}


def _with_integers(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _check(response, path: str) -> None:
    assert response.status_code < 500, (path, response.request.body)
    if response.status_code < 400:
        return
    body = response.json()
    if path in ANTHROPIC:
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
