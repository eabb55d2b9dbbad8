"""A replica of a fleet: one engine in a Ray actor. Its messages are bytes; see `fleet.wire`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
from ray import serve

from penstock.app import assemble
from penstock.computing import start_computing
from penstock.contract.clock import SystemClock
from penstock.contract.memory_budget import MemoryBudget
from penstock.fleet import ReplicaEngine, ReplicaLost
from penstock.fleet.description import Description, Options
from penstock.fleet.wire import write_error
from penstock.journal import model_digest
from penstock.remote.messages import Found
from penstock.watchdog import Watchdog

__all__ = ["EngineReplica"]

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""How long the engine may leave messages unanswered while no step is computed."""


class NotHere(Exception):
    """The call was meant for a replica that is gone."""


class EngineReplica:
    """An engine as Ray sees it. Every call names the replica that it is meant for (`to`).

    Args:
        message: `Options`, as MessagePack.

    Raises:
        SetupError: the model or an option cannot be used.
    """

    def __init__(self, message: bytes) -> None:
        options = msgspec.msgpack.decode(message, type=Options)
        self._name = serve.get_replica_context().replica_id.unique_id
        config = options.config
        if config.record:
            config = replace(config, record=f"{config.record}.{self._name}")
        self._around = ExitStack()
        self._watchdog = Watchdog()
        cache_dir = Path(options.cache_dir)
        starting = start_computing(config, cache_dir, serves=True)
        assembly = assemble(
            config, cache_dir, log.info, starting, self._watchdog, tenants=options.tenants, keeps_times=True
        )
        self._around.callback(assembly.close)
        client = assembly.start_client(memory=MemoryBudget(assembly.config.memory_limit))
        self._around.callback(client.close)
        self._around.enter_context(self._watchdog.looking())
        self._client = client
        self._engine = ReplicaEngine(client, assembly.text, SystemClock())
        facts = assembly.computing.facts
        self._description = Description(
            answers=model_digest(facts, assembly.card.max_model_len),
            found=Found.of(assembly.model),
            facts=facts,
            config=assembly.config,
            adapters=tuple(client.adapters().values()),
        )

    async def describe(self, to: str = "") -> bytes:
        """The description of its model: a `Description`, as MessagePack."""
        self._check(to)
        return msgspec.msgpack.encode(self._description)

    async def generate(self, message: bytes, to: str = "") -> AsyncGenerator[bytes, None]:
        """See `ReplicaEngine.generate`."""
        if to not in ("", self._name):
            yield write_error(ReplicaLost("it has left"))
            return
        async for answer in self._engine.generate(message):
            yield answer

    async def abort(self, request_id: str, to: str = "") -> None:
        """See `ReplicaEngine.abort`."""
        self._check(to)
        await self._engine.abort(request_id)

    async def heartbeat(self, to: str = "") -> None:
        """See `ReplicaEngine.heartbeat`."""
        self._check(to)
        await self._engine.heartbeat()

    async def reset_prefix_cache(self, to: str = "") -> None:
        """See `ReplicaEngine.reset_prefix_cache`."""
        self._check(to)
        await self._engine.reset_prefix_cache()

    async def state(self, to: str = "") -> bytes:
        """See `ReplicaEngine.state`."""
        self._check(to)
        return await self._engine.state()

    async def check_health(self) -> None:
        """Called by Ray, which replaces a replica that fails. The heartbeat takes the same path as work."""
        health = self._client.health()
        reason = self._watchdog.overdue() if health.alive else health.reason
        if reason:
            raise RuntimeError(reason)
        try:
            await asyncio.wait_for(self._engine.heartbeat(), HEARTBEAT_SECONDS)
        except TimeoutError:
            if self._watchdog.began() == float("inf"):
                raise RuntimeError("the engine takes no message") from None

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray, for `ray_scaling`."""
        state = await self._engine.current_state()
        health = state.health
        busy = (health.running + health.waiting) / max(1, health.slots)
        return {"waiting_seconds": state.waiting_seconds, "busy": busy}

    async def __del__(self) -> None:
        """Called by Ray once the replica has no requests any more: end the engine."""
        await asyncio.to_thread(self._around.close)

    def _check(self, to: str) -> None:
        if to not in ("", self._name):
            raise NotHere(to)
