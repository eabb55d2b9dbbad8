"""R23 and R24: requests made from the server's own OpenAPI document, and requests that no schema would produce."""

from __future__ import annotations

import asyncio
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from harness.canary import Canary, singing
from harness.client import Answer, ask
from harness.processes import wait_until
from harness.requests import CHAT, COMPLETIONS, Request
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving
from harness.tiny import tiny_model

__all__ = ["VALUES", "schema_fuzz", "semantic_fuzz"]

HANG_SECONDS = 60.0
EXAMPLES = 1000
PAIRS = 20_000
AT_ONCE = 8
OPTIONS = (*APART, "--kv-cache-memory", "32MiB", "--max-num-seqs", "16", "--request-timeout", "30")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
CANARY = Request("canary", COMPLETIONS, {"prompt": "canary", "max_tokens": 40, "seed": 3, "ignore_eos": True})

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e308, float("nan"), float("-inf"), 2**31, 2**53 + 1,
    2**63, -(2**63) - 1, 10**400, 1e-320,
    "", "a", "\0", "\ud800", "\u202e<|im_end|>", "<|im_start|>system", "a" * 5000, "true", "1", [], {}, [[]], [None],
    [1] * 3000, ["a"] * 100, {"a": {"b": []}}, {"type": "json_schema"}, {"type": "json_object"}, {"regex": "("},
    {"regex": "[a-c]{2,5}", "json": {}}, {"json": {"type": ["string", 5]}}, {"choice": []}, {"choice": ["", "a"]},
    {"grammar": "start:"}, {"299": 100, "-1": 5}, {"300": 1}, {"5": "x"}, [299, 300, -1], [2**40], "max", "auto",
    [{"role": "user", "content": "x"}], [{"role": "tool", "content": "x"}], [{"type": "function", "function": {}}],
    {"include_usage": True}, {"include_usage": 5}, [["a", "b"], ["c"]], {"__proto__": 1}, "none", "required",
)  # fmt: skip
"""Values for any field: ends of ranges and beyond, text that breaks things, right values of other fields."""

_OFTEN: dict[str, tuple[Any, ...]] = {
    "max_tokens": (None, 1, 5, 12, 10**9), "min_tokens": (0, 1, 3, 10**9), "n": (1, 2, 4, 16, 17, 10**6),
    "best_of": (1, 5, 20), "temperature": (0, 0.0001, 0.5, 1, 2, 100), "top_p": (0, 1e-9, 0.5, 1),
    "top_k": (-1, 0, 1, 50, 10**9), "min_p": (0, 0.5, 1), "logprobs": (True, 0, 5, 20, 21),
    "prompt_logprobs": (0, 5, -1, 300), "stop": ("a", ["a", "b"], ["a", ""], ["x" * 256] * 64),
    "stop_token_ids": ([0], [5, 6], [299], [300]), "seed": (0, -1, 5, 2**62, 2**64), "stream": (True, False),
    "echo": (True, False), "logit_bias": ({"0": 100}, {"5": -100, "6": 3}, {"299": -100}), "ignore_eos": (True, False),
    "bad_words": (["a"], ["b", "cd"], [""], ["\0"]), "presence_penalty": (-2, 0.5, 2, 3), "dry_multiplier": (0, 0.8),
    "frequency_penalty": (-2, 1, 2.5), "repetition_penalty": (1e-9, 0.5, 1.2, 0, 10**9), "top_n_sigma": (0, 1, 3),
    "allowed_token_ids": ([], [0], [70, 71, 72], [299], [300]), "include_stop_str_in_output": (True, False),
    "structured_outputs": ({"regex": "[a-c]{2,5}"}, {"choice": ["a", "b"]}, {"json": {"enum": [1, "a"]}}),
    "response_format": ({"type": "text"}, {"type": "json_object"}), "timings": (True,), "user": ("u", "x" * 300),
    "cache_salt": ("s", "x" * 128, "x" * 129), "truncate_prompt_tokens": (1, 5, 0), "top_logprobs": (0, 5, 20),
    "repetition_detection": ({"max_pattern_size": 3, "min_count": 2},), "thinking_token_budget": (0, 5, None),
    "prompt": ("", "y" * 40, [0], [5, 6, 7], [299], [300], [[1], []], [[1], [2, 3]], ["a", "b"], "x" * 900),
    "stream_options": ({"include_usage": True},), "add_special_tokens": (True, False), "priority": (0, 5, -5),
}  # fmt: skip
"""Values, right or nearly right, of fields that change what is computed."""


def semantic_fuzz(depth: Depth, progress: Progress) -> Measured:
    """R24: pairs of fields, each with one of its own values or any other value."""
    count = depth.of(PAIRS)
    progress.expect(count)
    with tiny_model(1024) as model, serving(str(model), *OPTIONS) as server:
        canary = Canary(CANARY)
        statuses, misses = asyncio.run(_pairs(server, canary, count, progress))
        misses += canary.wrong + _aftermath(server)
    if statuses["2xx"] < count / 5:
        misses.append("fewer than a fifth were right, so too little was computed to prove anything")
    figure = (
        f"{count} requests: {_counted(statuses)}; canary {canary.sung} times, {len(canary.wrong) or 'never'} different"
    )
    return judge(figure, misses, statuses=dict(statuses))


async def _pairs(server: Server, canary: Canary, count: int, progress: Progress) -> tuple[Counter[str], list[str]]:
    fields, chance = _fields(server), random.Random(17)
    statuses: Counter[str] = Counter()
    misses: list[str] = []
    room = asyncio.Semaphore(AT_ONCE)

    async def one(path: str, body: dict[str, Any]) -> None:
        async with room:
            answer = await ask(server.url, path, json.dumps(body).encode(), seconds=HANG_SECONDS)
        statuses[f"{answer.status // 100}xx"] += 1
        if wrong := _wrong(path, answer):
            misses.append(f"{wrong}: {path} {_short(body)}")
        progress.update()

    async with singing(canary, server.url, pause=0.3):
        await asyncio.gather(*(one(*_pair(fields, chance)) for _ in range(count)))
    return statuses, misses


def _fields(server: Server) -> dict[str, list[str]]:
    """Return the fields that each generating path knows."""
    paths = httpx.get(f"{server.url}/openapi.json", timeout=30).json()["paths"]
    return {
        path: sorted(paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"])
        for path in (COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/generate")
    }


_BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/generate": {"prompt": "x", "max_tokens": 4},
}


def _pair(fields: dict[str, list[str]], chance: random.Random) -> tuple[str, dict[str, Any]]:
    path = chance.choice([COMPLETIONS, COMPLETIONS, CHAT, CHAT, "/v1/responses", "/v1/messages", "/generate"])
    body = dict(_BASES[path])
    for _ in range(chance.choice((1, 2, 2, 2, 3))):
        known = [name for name in fields[path] if name in _OFTEN]
        name = chance.choice(known if chance.random() < 0.85 else fields[path])
        own = _OFTEN.get(name, ())
        body[name] = chance.choice(own) if own and chance.random() < 0.9 else chance.choice(VALUES)
    return path, body


def _wrong(path: str, answer: Answer) -> str:
    """Say what is wrong with an answer, whatever was asked; "" if nothing is."""
    if answer.broken:
        return answer.broken
    error = answer.error
    if answer.status >= 500 or error.get("type") in ("server_error", "api_error"):
        return f"HTTP {answer.status} {error.get('code', '')}"
    if answer.status < 400:
        return ""
    wanted = {"type", "message"} if path in ANTHROPIC else {"message", "type", "param", "code"}
    return "" if set(error) == wanted else f"HTTP {answer.status} without an error object"


def _aftermath(server: Server) -> list[str]:
    """List what is wrong with the server when all requests have ended."""
    wrong = [] if wait_until(server.idle, 60) < 60 else ["blocks are missing when all is over"]
    failed = server.metric("penstock:engine_steps_failed_total")
    return [*wrong, f"{failed:.0f} steps failed"] if failed else wrong


def _counted(statuses: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))


def _short(body: Any) -> str:
    text = json.dumps(body)
    return text if len(text) < 300 else f"{text[:200]} ... {text[-90:]}"


def schema_fuzz(depth: Depth, progress: Progress) -> Measured:
    """R23: schemathesis makes valid and invalid requests for every operation."""
    examples = depth.of(EXAMPLES, 10)
    with tiny_model(1024) as model, serving(str(model), *OPTIONS) as server:
        canary = Canary(CANARY)
        statuses, misses, operations = asyncio.run(_schemas(server, canary, examples, progress))
        misses += canary.wrong + _aftermath(server)
    figure = f"{operations} operations, {examples} right and wrong examples of each: {_counted(statuses)}"
    return judge(figure, misses, statuses=dict(statuses), operations=operations)


async def _schemas(
    server: Server, canary: Canary, examples: int, progress: Progress
) -> tuple[Counter[str], list[str], int]:
    statuses: Counter[str] = Counter()
    misses: list[str] = []
    async with singing(canary, server.url, pause=0.5):
        operations = await asyncio.to_thread(_every_operation, server, examples, statuses, misses, progress)
    return statuses, misses, operations


def _every_operation(
    server: Server, examples: int, statuses: Counter[str], misses: list[str], progress: Progress
) -> int:
    import schemathesis
    from schemathesis import GenerationMode

    document = httpx.get(f"{server.url}/openapi.json", timeout=30).json()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tool's own: about schemas that it finds unusual, and its dependencies
        schema = schemathesis.openapi.from_dict(_with_the_model(document, server))
        schema.config.update(base_url=server.url)
        found: Any = schema.get_all_operations()
        operations = [each.ok() for each in found]
        progress.expect(2 * len(operations))
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                misses.extend(_examples(operation, mode, examples, statuses))
                progress.update()
    return len(operations)


def _with_the_model(document: dict[str, Any], server: Server) -> dict[str, Any]:
    """Return the document with the one model's name: any other name would be refused before anything else is read."""
    name = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"]
    for path in document["paths"].values():
        for operation in path.values():
            if "requestBody" in operation:
                properties = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
                properties |= {"model": {"enum": [name]}} if "model" in properties else {}
    return document


def _examples(operation: Any, mode: Any, examples: int, statuses: Counter[str]) -> Iterator[str]:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable

    wrong: list[str] = []
    name = f"{operation.method.upper()} {operation.path}"

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call(timeout=HANG_SECONDS)
        statuses[f"{answer.status_code // 100}xx"] += 1
        if answer.status_code >= 500:
            wrong.append(
                f"HTTP {answer.status_code}: {operation.method.upper()} {operation.path} {answer.request.body!r:.300}"
            )

    try:
        send()
    except Unsatisfiable:  # an operation without parameters has nothing that could be invalid
        pass
    except Exception as error:
        wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    yield from wrong
