"""Engines without tensors behind links that carry bytes, and that are cut where a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from certificate_makers import CONTRACT
from engine_harness import Harness, Scoring, Unhurried, build

from penstock.contract.events import ChoiceDelta, ChoiceFinished, Output, PromptTokens, RequestFailed, RequestFinished
from penstock.contract.measurements import Measurements
from penstock.contract.request import EngineRequest
from penstock.engine import EngineLoop, LocalClient, QueueLimits, ResolvedRequest
from penstock.fleet import FleetClient, ReplicaEngine, ReplicaLost, ReplicaState
from penstock.fleet.keys import PromptKeys
from penstock.fleet.wire import read_outputs, read_state, write_request, write_state
from penstock.routing import Router


class Ticks:
    """A real clock."""

    def now(self) -> float:
        return time.monotonic()


def never() -> bool:
    return False


class Member:
    """One engine, its loop and its link. `cut` is asked before and after each message: True cuts the link there."""

    def __init__(self, name: str, cut: Callable[[], bool] = never, max_queued: int = 1000, **config) -> None:
        self.name = name
        self.cut = cut
        self.gone = False
        self.asked: list[ResolvedRequest] = []
        pause = config.pop("pause", 0.0)
        self.bench: Harness = build(
            around=lambda runner: Unhurried(Scoring(runner), pause), contract=CONTRACT, **config
        )
        self.loop = EngineLoop(self.bench.engine, Ticks(), QueueLimits(max_queued))
        self.loop.start()
        self.client = LocalClient(self.bench.intake, self.loop)
        self.side = ReplicaEngine(self.client, self.bench.text, Ticks())

    async def generate(self, request: ResolvedRequest) -> AsyncGenerator[list[Output], None]:
        self.asked.append(request)
        async with aclosing(self.side.generate(write_request(request))) as messages:
            async for message in messages:
                self._check()
                yield read_outputs(message)
                self._check()

    def _check(self) -> None:
        if self.gone or self.cut():
            raise ReplicaLost("the link was cut")

    async def abort(self, request_id: str) -> None:
        await self.side.abort(request_id)

    async def heartbeat(self) -> None:
        if self.gone:
            raise ReplicaLost("gone")
        await self.side.heartbeat()

    async def reset_prefix_cache(self) -> None:
        await self.side.reset_prefix_cache()

    def state(self) -> ReplicaState | None:
        return read_state(write_state(ReplicaState(self.client.health(), self.client.measurements())))

    @property
    def idle(self) -> bool:
        health = self.client.health()
        return not health.running and not health.waiting and health.free_blocks == health.total_blocks


@dataclass
class Members:
    """The replicas that exist."""

    members: dict[str, Member] = field(default_factory=dict)
    ever: list[Member] = field(default_factory=list)

    def present(self) -> dict[str, Member]:
        return dict(self.members)

    def add(self, cut: Callable[[], bool] = never, **config) -> Member:
        member = Member(f"replica-{len(self.ever)}", cut, **config)
        self.ever.append(member)
        self.members[member.name] = member
        return member

    def kill(self, member: Member) -> None:
        """Cut the member's link, and remove it from the members."""
        member.gone = True
        del self.members[member.name]

    def measured(self) -> list[Measurements]:
        return [member.client.measurements() for member in self.ever]


@asynccontextmanager
async def fleet(members: Members, router=None, clock=None, room=None) -> AsyncGenerator[FleetClient, None]:
    """A client of the members; at the end every living engine is idle and holds nothing."""
    bench = members.ever[0].bench if members.ever else build()
    config = bench.config
    like = bench.engine.measurements()
    keys = PromptKeys(config.model_digest, config.block_size)
    client = FleetClient(bench.intake, members, router or Router(), keys, clock or Ticks(), like, room)
    try:
        yield client
        await eventually(lambda: all(member.idle for member in members.ever if member.loop.health().alive))
    finally:
        client.close()
        for member in members.ever:
            await asyncio.to_thread(member.client.close)
    for member in members.ever:
        member.bench.engine.scheduler.check()


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


async def collect(client, request: EngineRequest) -> list[Output]:
    return [output async for output in client.generate(request)]


def joined(outputs: Sequence[Output]) -> dict:
    """All that outputs say, except where they were cut, when they came, and how much was cached."""
    deltas: dict[int, ChoiceDelta] = {}
    said: dict = {"prompts": [], "ends": {}}
    for output in outputs:
        match output:
            case ChoiceDelta(choice):
                assert choice not in said["ends"], "nothing comes after a choice's end"
                deltas[choice] = deltas[choice].then(output) if choice in deltas else output
            case ChoiceFinished(choice, reason, stop):
                assert choice not in said["ends"]
                said["ends"][choice] = (reason, stop)
            case PromptTokens():
                said["prompts"].append(str(output))
                assert not deltas
            case RequestFinished(usage):
                said["usage"] = (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens)
                said["certificate"] = output.certificate
            case RequestFailed():
                said["failed"] = output.message
    said["choices"] = {
        choice: (delta.text, delta.tokens, delta.reasoning, delta.calls, delta.reasoning_tokens)
        for choice, delta in sorted(deltas.items())
        if not delta.empty
    }
    assert isinstance(outputs[-1], RequestFinished | RequestFailed)
    return said
