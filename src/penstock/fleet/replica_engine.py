"""A replica's side of a link: one engine, asked in bytes and answering in bytes.

The client is where requests are resolved, refused and counted against tenants. Here they are only computed: what comes
is a whole request with nothing left to decide.
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
        text: its model's text, which parses answers.
        clock: the engine's.
    """

    def __init__(self, client: LocalClient, text: TextModel, clock: Clock) -> None:
        self._client = client
        self._text = text
        self._clock = clock
        self._live: dict[str, object] = {}
        self._rate = ReadingRate()

    async def generate(self, message: bytes) -> AsyncGenerator[bytes, None]:
        """The messages that answer one with a request; see `wire`. Closing early aborts it.

        A request that lives here already is aborted first: its client has lost the link and comes again.
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
                        await self._client.heartbeat()  # raises if that is why
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
        """How it is now; see `ReplicaState`.

        Raises:
            EngineDead: the engine is dead.
        """
        return write_state(await self.current_state())

    async def current_state(self) -> ReplicaState:
        """As `state`, as a value."""
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
