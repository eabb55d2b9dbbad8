"""A replica's side of a link: one engine, asked in bytes and answering in bytes.

The client resolves requests, refuses them and counts them against tenants. Here they are only computed: a message holds
a complete request with nothing left to decide.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from penstock.contract.errors import EngineDead, Overloaded, PenstockError
from penstock.contract.events import RequestFailed
from penstock.contract.ports import Clock
from penstock.engine import LocalClient
from penstock.fleet.reading_rate import ReadingRate
from penstock.fleet.replica import ReplicaLost, ReplicaState
from penstock.fleet.wire import read_request, write_error, write_outputs, write_state
from penstock.text import TextModel

__all__ = ["ReplicaEngine"]

log = logging.getLogger(__name__)


class ReplicaEngine:
    """One engine behind a link. Confined to one event loop.

    Args:
        client: the engine.
        text: the text half of its model, which parses answers.
        clock: the engine's clock.
    """

    def __init__(self, client: LocalClient, text: TextModel, clock: Clock) -> None:
        self._client = client
        self._text = text
        self._clock = clock
        self._live: dict[str, object] = {}
        self._rate = ReadingRate()

    async def generate(self, message: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the messages that answer a message with a request; see `wire`. Closing early aborts the request.

        If a request with this id is live here already, it is aborted first: its client lost the link and asks again.
        """
        try:
            resolved = read_request(message, self._text, self._clock.now())
        except msgspec.MsgspecError as error:
            log.error("a message is no request: %s", error)
            yield write_error(ReplicaLost("it could not read the request: is it of another version?"))
            return
        if resolved.id in self._live:
            await self._client.abort(resolved.id)
        mark = self._live[resolved.id] = object()
        try:
            async with aclosing(self._client.stream(resolved)) as batches:
                async for outputs in batches:
                    if isinstance(outputs[-1], RequestFailed):
                        await self._client.heartbeat()  # raises if the engine is dead and the request failed for that
                    yield write_outputs(outputs)
        except EngineDead as dead:
            yield write_error(ReplicaLost(str(dead)))
        except PenstockError as error:
            yield write_error(error)
        finally:
            if self._live.get(resolved.id) is mark:
                del self._live[resolved.id]

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        await self._client.abort(request_id)

    async def heartbeat(self) -> None:
        """See `EngineClient.heartbeat`."""
        await self._client.heartbeat()

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`."""
        await self._client.reset_prefix_cache()

    async def state(self) -> bytes:
        """The replica's current state as a message; see `ReplicaState`.

        Raises:
            EngineDead: the engine is dead.
        """
        return write_state(await self.current_state())

    async def current_state(self) -> ReplicaState:
        """The replica's current state as a value; raises as `state` does."""
        backlog, waiting = await self._client.waiting_seconds()
        health = self._client.health()
        self._rate.look(self._clock.now(), backlog, health.computed_tokens)
        retry_after = 0
        try:
            self._client.check_queue("")
        except Overloaded as full:
            retry_after = full.retry_after
        return ReplicaState(
            health, self._client.measurements(), backlog, waiting, retry_after, self._rate.tokens_per_second
        )
