"""`GET /engine/events`: what the engine is doing, once a second, as server-sent events.

Decides what of `Health` is told, how often, to how many at once and for how long. Holds no history and keeps no
copy: an event is one look at the client's health when it is sent, so a viewer costs one attribute read a second, and
one that reads slowly costs nothing more. Rates are left to the viewer, who divides differences of counters by
differences of `at`. Carries numbers only: no prompt, no id, no tenant.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import Overloaded
from penstock.contract.ports import EngineClient, Health
from penstock.server.connection import ClientLeft, while_connected
from penstock.server.delivery import EVENT_HEADERS, Outlet
from penstock.server.failures import error_response
from penstock.server.stopping import stopping_event
from penstock.server.strict_json import JsonObject, encode

__all__ = ["EVENTS_PATH", "add_engine_events"]

EVENTS_PATH = "/engine/events"

PERIOD_SECONDS = 1.0
LONGEST_SECONDS = 600.0
"""After this a stream ends, and a viewer that is still there asks again: a connection that nobody watches goes away."""

MAX_VIEWERS = 32

FIELDS = (
    "alive",
    "reason",
    "running",
    "waiting",
    "slots",
    "free_blocks",
    "cached_blocks",
    "total_blocks",
    "steps",
    "preemptions",
    "query_tokens",
    "hit_tokens",
    "computed_tokens",
    "generated_tokens",
)


def add_engine_events(app: FastAPI, client: EngineClient) -> None:
    """Put the stream on its path. It is not in the OpenAPI document: it is no request with an answer that ends."""
    audience = _Audience()
    stopping = stopping_event(app)

    @app.get(EVENTS_PATH, include_in_schema=False)
    async def engine_events() -> Response:
        """What the engine is doing, once a second."""
        return _EventStream(client, audience, stopping)


def snapshot(health: Health) -> JsonObject:
    """One event: the state, the counters since the start, and `at`, seconds on the server's monotone clock."""
    return {name: getattr(health, name) for name in FIELDS} | {"at": round(time.monotonic(), 3)}


class _Audience:
    """How many viewers there are. Owned by the application, used on its event loop only."""

    def __init__(self) -> None:
        self.viewers = 0


class _EventStream(Response):
    """The endless answer."""

    def __init__(self, client: EngineClient, audience: _Audience, stopping: asyncio.Event) -> None:
        self._client = client
        self._audience = audience
        self._stopping = stopping
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell until the viewer leaves, the server stops or the time is over."""
        if self._audience.viewers >= MAX_VIEWERS:
            full = Overloaded(f"{MAX_VIEWERS} viewers watch the engine already.", retry_after=10)
            await error_response(full)(scope, receive, send)
            return
        self._audience.viewers += 1
        try:
            await while_connected(receive, self._tell(Outlet(send)))
        except ClientLeft:
            return
        finally:
            self._audience.viewers -= 1

    async def _tell(self, outlet: Outlet) -> None:
        await outlet.start(EVENT_HEADERS)
        end = time.monotonic() + LONGEST_SECONDS
        while True:
            await outlet.write(b"data: " + encode(snapshot(self._client.health())) + b"\n\n")
            if await self._stops_within(PERIOD_SECONDS) or time.monotonic() >= end:
                break
        await outlet.end()

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False
