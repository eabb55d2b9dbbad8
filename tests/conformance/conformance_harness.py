"""What the conformance tests share: answers put together from their pieces, and an engine that steps when told to.

The pieces are put together here without the official clients' own accumulators, so that these can be checked too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from engine_harness import Harness, Scoring, build

from penstock.contract.config import DEFAULT_MODEL
from penstock.contract.limits import DEFAULT_LIMITS, ServerLimits
from penstock.contract.model import ModelCard
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.ports import EngineClient, Runner
from penstock.contract.server_config import ServerConfig
from penstock.engine import EngineLoop, LocalClient, QueueLimits
from penstock.server import create_app
from penstock.server.http.run import Server
from penstock.sim.fake_runner import FakeRunner

MODEL = DEFAULT_MODEL
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
PATIENCE = 30.0  # seconds; tests may be stopped for a while on a busy machine
UNHURRIED = ServerLimits(header_seconds=PATIENCE)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def whole_chat(answer: Any) -> list[dict[str, Any]]:
    """All that the choices of a whole chat answer say, except the ids of calls, which follow from the answer's id."""
    return [_chat_choice(choice.message, choice) for choice in sorted(answer.choices, key=lambda each: each.index)]


def _chat_choice(message: Any, choice: Any) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": (message.content or "").encode(),
        "calls": [(call.function.name, call.function.arguments.encode()) for call in message.tool_calls or ()],
        "logprobs": [entry.model_dump() for entry in (choice.logprobs.content if choice.logprobs else None) or ()],
        "finish_reason": choice.finish_reason,
        "stop_reason": getattr(choice, "stop_reason", None),
    }


def joined_chat(chunks: Iterable[Any]) -> list[dict[str, Any]]:
    """The same of a streamed chat answer."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = found.setdefault(choice.index, {"role": None, "content": b"", "calls": [], "logprobs": []})
            assert "finish_reason" not in said, "nothing comes after a choice's end"
            _add_chat(said, choice)
    return [found[index] for index in sorted(found)]


def _add_chat(said: dict[str, Any], choice: Any) -> None:
    said["role"] = said["role"] or choice.delta.role
    said["content"] += (choice.delta.content or "").encode()
    for piece in choice.delta.tool_calls or ():
        if piece.index == len(said["calls"]):
            assert piece.id
            assert piece.type == "function"
            said["calls"].append((piece.function.name, b""))
        name, arguments = said["calls"][piece.index]
        said["calls"][piece.index] = (name, arguments + (piece.function.arguments or "").encode())
    if choice.logprobs:
        said["logprobs"] += [entry.model_dump() for entry in choice.logprobs.content]
    if choice.finish_reason:
        said["finish_reason"] = choice.finish_reason
        said["stop_reason"] = getattr(choice, "stop_reason", None)


LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


def whole_text(answer: Any) -> list[dict[str, Any]]:
    """All that the choices of a whole text completion say."""
    return [
        {
            "text": choice.text.encode(),
            "logprobs": _lists(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        for choice in sorted(answer.choices, key=lambda each: each.index)
    ]


def joined_text(chunks: Iterable[Any]) -> list[dict[str, Any]]:
    """The same of a streamed text completion."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = found.setdefault(choice.index, {"text": b"", "logprobs": _lists(None)})
            assert "finish_reason" not in said, "nothing comes after a choice's end"
            said["text"] += choice.text.encode()
            for name, values in _lists(choice.logprobs).items():
                said["logprobs"][name] += values
            if choice.finish_reason:
                said |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    return [found[index] for index in sorted(found)]


def _lists(logprobs: Any) -> dict[str, list[Any]]:
    return {name: list(getattr(logprobs, name, None) or ()) for name in LISTS}


def counted(usage: Any) -> tuple[int, int]:
    """The token counts that do not depend on the state of the cache."""
    return usage.prompt_tokens, usage.completion_tokens


class Gate:
    """A runner that computes a step when the test lets it. Shared by the engine's thread and the test's."""

    def __init__(self, runner: Runner) -> None:
        self.plans: list[StepPlan] = []
        self._runner = runner
        self._permits = threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        """Wait for a permit, then compute."""
        self.plans.append(plan)
        self._permits.acquire()
        return self._runner.run(plan)

    def allow(self, steps: int) -> None:
        """Let this many steps happen."""
        self._permits.release(steps)

    def open(self) -> None:
        """Let all steps happen from now on."""
        self.allow(100_000)


class NotedLoop(EngineLoop):
    """The engine's loop, which remembers the requests that it was asked to abort."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aborted: list[str] = []

    def abort(self, request_id: str) -> None:
        """Abort as the engine's loop does."""
        super().abort(request_id)
        self.aborted.append(request_id)


@dataclass(frozen=True)
class GatedServer:
    """A real HTTP server, the real engine and scheduler, and a fake runner behind a gate."""

    url: str
    harness: Harness
    gate: Gate
    loop: NotedLoop

    def step_until(self, condition: Callable[[], bool], most: int) -> None:
        """Let one step after another happen until a condition holds."""
        for _ in range(most):
            if condition():
                return
            before = self.loop.health().steps
            self.gate.allow(1)
            wait_until(lambda before=before: self.loop.health().steps > before)
        assert condition(), f"not so after {most} steps"

    def post(self, path: str, **body: Any) -> httpx.Response:
        """A request that waits for its whole answer."""
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Ticks:
    """A real clock."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()


@contextmanager
def gated(max_queued: int = 64, **scheduler: Any) -> Iterator[GatedServer]:
    """Serve a harness; at the end everything in it is idle and every block is back."""
    gates: list[Gate] = []

    def around(runner: FakeRunner) -> Gate:
        gates.append(Gate(Scoring(runner)))
        return gates[0]

    harness = build(around=around, **scheduler)
    loop = NotedLoop(harness.engine, Ticks(), QueueLimits(max_queued))
    loop.start()
    try:
        with listening(LocalClient(harness.intake, loop), harness.card) as url:
            yield GatedServer(url, harness, gates[0], loop)
            gates[0].open()
            wait_until(lambda: not loop.health().running and not loop.health().waiting)
            assert loop.health().free_blocks == loop.health().total_blocks
    finally:
        gates[0].open()
        loop.stop()


@contextmanager
def listening(client: EngineClient, card: ModelCard) -> Iterator[str]:
    """The application over an engine, on a free port, in a thread."""
    ready: list[str] = []
    app = create_app(client, card, DEFAULT_LIMITS)
    server = Server(app, ServerConfig(port=0), ready.append, 1, UNHURRIED)
    thread = threading.Thread(target=lambda: asyncio.run(server.listen()))
    thread.start()
    try:
        wait_until(lambda: bool(ready))
        yield ready[0]
    finally:
        server.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
