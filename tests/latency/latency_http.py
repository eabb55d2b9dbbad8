"""A server over HTTP in front of the real engine, whose fake runner takes its time, and a load for it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from engine_harness import VOCABULARY, text_model
from server_harness import running

from penstock.contract.clock import SystemClock
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.engine import Engine, EngineLoop, Intake, LocalClient, Recorder
from penstock.engine.admission import QueueLimits
from penstock.sim.fake_runner import FakeRunner

NAME = "acme/tiny-1"
LATE_DRAWS = 20
"""How many draws of a guided sequence wait for their masks."""


class Paced:
    """A fake runner that takes real time: for each step, position of a prompt, and row."""

    def __init__(self, runner: FakeRunner, step: float, token: float) -> None:
        self._runner = runner
        self._step = step
        self._token = token

    def run(self, plan: StepPlan) -> StepResult:
        began = time.monotonic()
        for admit in plan.admits:
            if admit.grammar is not None and admit.prompt_tokens == len(admit.tokens):
                self._runner.let_wait(admit.seq_id, LATE_DRAWS)
        result = self._runner.run(plan)
        ends = began + self._step + self._token * plan.num_tokens
        time.sleep(max(0.0, ends - time.monotonic()))
        return replace(result, seconds=time.monotonic() - began)

    def reset(self) -> bool:
        return self._runner.reset()


class AnyGrammar:
    """Takes every grammar, and compiles none: the fake runner asks for no matcher."""

    def check(self, grammar, max_new_tokens, tenant=""):
        return grammar

    def matcher(self, grammar, max_new_tokens, prompt=()):
        raise AssertionError("nobody asks")


@contextmanager
def serving(record: Path, *, step: float = 0.002, token: float = 0.0002, **options) -> Iterator[str]:
    """The URL of a server whose engine records what it does."""
    sizes = {"num_blocks": 2048, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = SchedulerConfig(**{**sizes, "max_model_len": 1024, "weigh_drafts": False, **options})
    clock, text = SystemClock(), text_model()
    runner = Paced(FakeRunner(config, vocab_size=len(VOCABULARY)), step, token)
    engine = Engine(Scheduler(config), runner, text, Recorder(record, config, clock), clock=clock)
    card = ModelCard(NAME, 0, config.max_model_len, len(VOCABULARY), True)
    intake = Intake(text, card, DEFAULT_LIMITS, clock, lambda: 7, config.policy, AnyGrammar())
    loop = EngineLoop(engine, clock, QueueLimits(1000))
    loop.start()
    client = LocalClient(intake, loop)
    try:
        with running(client, card=card, limits=DEFAULT_LIMITS) as url:
            yield url
    finally:
        client.close()
        engine.close()


@dataclass(frozen=True)
class Told:
    """What a client learned of its request.

    Attributes:
        seconds: from before it was sent until the end was read.
        timings: what the answer ended with.
    """

    id: str
    seconds: float
    timings: dict[str, Any]

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds by part, without the sum and the reasons."""
        return {name: ms for name, ms in self.timings["parts_ms"].items() if name not in ("total", "queue_for")}


def read(answer: bytes, seconds: float) -> Told:
    """An answer in events or in one object."""
    if not answer.startswith(b"data: "):
        body = json.loads(answer)
        return Told(body.get("id", ""), seconds, body["timings"])
    events = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    return Told(last["id"], seconds, last["timings"])


def mixed(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of any kind: path and body."""
    text = "".join(draw.choice("abcdefgh") for _ in range(draw.choice((3, 20, 20, 200))))
    body: dict[str, Any] = {"max_tokens": draw.randint(4, 40), "timings": True, "ignore_eos": True, "seed": 3}
    body |= draw.choice(({}, {"stream": True}, {"stream": True}, {"n": 2}))
    if draw.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": draw.choice((text, [text, text + "!"]))}


async def send(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Told:
    """Send one request, and read its answer."""
    began = time.monotonic()
    answer = await http.post(path, json=body)
    seconds = time.monotonic() - began
    assert answer.status_code == 200, answer.text
    return read(answer.content, seconds)


async def load(url: str, count: int, at_once: int, seed: int = 1) -> list[Told]:
    """Send so many requests, `at_once` of them together."""
    draw, turns = random.Random(seed), asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=at_once)) as http:

        async def one(path: str, body: dict[str, Any]) -> Told:
            async with turns:
                return await send(http, path, body)

        return list(await asyncio.gather(*[one(*mixed(draw)) for _ in range(count)]))
