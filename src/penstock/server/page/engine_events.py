"""`GET /engine/events`: what the engine is doing, once a second, as server-sent events.

There is no history and no buffer: an event is the engine's health when it is sent, so a viewer costs one attribute read
a second, and a slow viewer costs no more. Viewers compute rates: differences of counters divided by differences of
`at`. Apart from `alive` and `reason`, events hold numbers only: no prompt, no id, no tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api_fields.strict_json import JsonObject, encode
from penstock.contract.errors import Overloaded
from penstock.contract.ports import Health
from penstock.server.delivery.serving import Serving
from penstock.server.http.connection import ClientLeft, while_connected
from penstock.server.http.failures import error_response
from penstock.server.http.response_writer import EVENT_HEADERS, ResponseWriter
from penstock.server.http.route import Route

__all__ = ["EVENTS_PATH", "Look", "events_route", "routes", "snapshot"]

EVENTS_PATH = "/engine/events"

PERIOD_SECONDS = 1.0
LONGEST_SECONDS = 600.0
"""A stream ends after this time, and a viewer that is still there reconnects: abandoned connections go away."""

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


Look = Callable[[], JsonObject]
"""Makes one event from the present state."""


def routes(serving: Serving) -> tuple[Route, ...]:
    """The stream's endpoint."""
    return (events_route(lambda _: lambda: snapshot(serving.client.health()), serving.stopping),)


def events_route(choose: Callable[[Request], Look], stopping: asyncio.Event) -> Route:
    """The stream's endpoint. `choose` picks what a viewer sees; it may raise a `RequestError`.

    It is not in the OpenAPI document, where every response has an end.
    """
    audience = _Audience()

    async def engine_events(http_request: Request) -> Response:
        """What the engine is doing, once a second."""
        return _EventStream(choose(http_request), audience, stopping)

    return Route("GET", EVENTS_PATH, engine_events, documented=False)


def snapshot(health: Health) -> JsonObject:
    """One event: the state, the counters since the start, and `at`, seconds on the server's monotonic clock."""
    return {name: getattr(health, name) for name in FIELDS} | {"at": round(time.monotonic(), 3)}


class _Audience:
    """Counts viewers. Confined to one event loop."""

    def __init__(self) -> None:
        self.viewers = 0


class _EventStream(Response):
    """The response that streams events."""

    def __init__(self, look: Look, audience: _Audience, stopping: asyncio.Event) -> None:
        self._look = look
        self._audience = audience
        self._stopping = stopping
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the viewer disconnects, the server stops or `LONGEST_SECONDS` are over."""
        if self._audience.viewers >= MAX_VIEWERS:
            full = Overloaded(f"{MAX_VIEWERS} viewers watch the engine already.", retry_after=10)
            await error_response(full)(scope, receive, send)
            return
        self._audience.viewers += 1
        try:
            await while_connected(receive, self._tell(ResponseWriter(send)))
        except ClientLeft:
            return
        finally:
            self._audience.viewers -= 1

    async def _tell(self, writer: ResponseWriter) -> None:
        await writer.start(EVENT_HEADERS)
        end = time.monotonic() + LONGEST_SECONDS
        while True:
            await writer.write(b"data: " + encode(self._look()) + b"\n\n")
            if await self._stops_within(PERIOD_SECONDS) or time.monotonic() >= end:
                break
        await writer.end()

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False
