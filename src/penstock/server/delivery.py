"""Getting an answer onto the wire: whole as JSON, piece by piece as server-sent events, or as plain text.

Decides when the answer starts (with the engine's first output, so that an error before it still has its own status and
time to first token is honest), how events are framed (WHATWG HTML, section "Server-sent events"), and what becomes of a
failure after the start. What a chunk looks like is a `Shape`'s business.
Invariants: whatever ends an answer early (the client leaves, an error, shutdown), the engine's iterators are closed
before it is over; bytes are written only as fast as the client reads.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Mapping
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.contract.ports import EngineClient
from penstock.server.connection import ClientLeft, while_connected
from penstock.server.exchange import Exchange, Replies, Transcript
from penstock.server.failures import ShuttingDown, error_object, error_response, json_response
from penstock.server.observation import account_of
from penstock.server.prompt_logprobs import PromptLogprobs, add_prompt_logprobs
from penstock.server.strict_json import JsonObject, encode
from penstock.server.timings import timings_object

__all__ = [
    "DONE",
    "Delivery",
    "EngineResponse",
    "EventDelivery",
    "Outlet",
    "Shape",
    "TextDelivery",
    "WholeDelivery",
    "WholeShape",
    "log_failure",
]

logger = logging.getLogger("penstock.server")

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
TEXT_HEADERS = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class WholeShape(Protocol):
    """How one endpoint writes a whole answer."""

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The whole answer."""
        ...


class Shape(WholeShape, Protocol):
    """How one endpoint writes its answers, whole or in chunks. One instance an answer: it may count as it goes."""

    def opening(self, index: int) -> JsonObject | None:
        """The chunk that opens a choice, if the endpoint has one."""
        ...

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with more of a choice; None when it would say nothing."""
        ...

    def ending(self, finished: ChoiceFinished) -> JsonObject:
        """The chunk that ends a choice."""
        ...

    def usage(self, usage: Usage) -> JsonObject:
        """The chunk with the usage of the whole answer."""
        ...


class Outlet:
    """The writing half of one HTTP answer; remembers whether it has started."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def start(self, headers: Mapping[str, str]) -> None:
        """Send status 200 and the headers, once; later calls do nothing."""
        if self.started:
            return
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond(self, response: Response) -> None:
        """Send a whole answer instead."""
        self.started = True
        headers = response.raw_headers
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})


class Delivery(Protocol):
    """One way of sending an answer."""

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        """Send everything, the end included."""
        ...

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        """The answer had started and cannot be completed: say so."""
        ...


class WholeDelivery:
    """The answer in one JSON object."""

    def __init__(
        self,
        shape: WholeShape,
        num_choices: int,
        timings: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._shape = shape
        self._num_choices = num_choices
        self._timings = timings
        self._prompt_logprobs = prompt_logprobs

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        """Wait for everything, then send it."""
        transcript = Transcript(self._num_choices)
        async with aclosing(replies.stream()) as stream:
            async for output in stream:
                transcript.take(output)
        answer = self._shape.whole(transcript.choices(), replies.usage)
        if self._prompt_logprobs is not None:
            prompts = [prompt for _, prompt in sorted(replies.prompts.items())]
            add_prompt_logprobs(answer, self._prompt_logprobs, prompts)
        if self._timings:
            answer["timings"] = timings_object(replies.timings, replies.usage, self._num_choices)
        await outlet.respond(json_response(200, answer))

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        """A whole answer is sent at once: when it has started, there is nothing left that could fail."""


class EventDelivery:
    """The answer as server-sent events, `[DONE]` last; usage and timings, where asked for, are in the last chunk."""

    def __init__(self, shape: Shape, include_usage: bool, timings: bool = False) -> None:
        self._shape = shape
        self._include_usage = include_usage
        self._timings = timings
        self._open: set[int] = set()

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        """One event or more for each output, as it comes."""
        async with aclosing(replies.stream()) as stream:
            async for output in stream:
                events = self._events(output)
                if events:
                    await outlet.start(EVENT_HEADERS)
                    await outlet.write(events)
        await outlet.start(EVENT_HEADERS)
        timings = timings_object(replies.timings, replies.usage, len(self._open)) if self._timings else None
        await outlet.write(self._closing(replies.usage, timings) + DONE)
        await outlet.end()

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        """The usage so far (the official client stops reading at the error), the error, `[DONE]`."""
        await outlet.write(self._closing(usage) + _event(error) + DONE)
        await outlet.end()

    def _events(self, output: ChoiceDelta | ChoiceFinished) -> bytes:
        opening = None if output.choice in self._open else self._shape.opening(output.choice)
        self._open.add(output.choice)
        if isinstance(output, ChoiceDelta):
            chunks = [self._shape.piece(delta) for delta in output.parts()]
        else:
            chunks = [self._shape.ending(output)]
        return b"".join(_event(self._with_usage_key(each)) for each in (opening, *chunks) if each is not None)

    def _with_usage_key(self, chunk: JsonObject) -> JsonObject:
        return chunk | {"usage": None} if self._include_usage else chunk

    def _closing(self, usage: Usage, timings: JsonObject | None = None) -> bytes:
        if not self._include_usage and timings is None:
            return b""
        chunk = self._shape.usage(usage)
        if not self._include_usage:
            del chunk["usage"]
        return _event(chunk if timings is None else chunk | {"timings": timings})


class TextDelivery:
    """The bare text as it comes, without any framing."""

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        """Each delta's text."""
        async with aclosing(replies.stream()) as stream:
            async for output in stream:
                if isinstance(output, ChoiceDelta) and output.text:
                    await outlet.start(TEXT_HEADERS)
                    await outlet.write(output.text.encode())
        await outlet.start(TEXT_HEADERS)
        await outlet.end()

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        """Leave the body unended: the server then cuts the connection, and no client takes the text for complete."""


class EngineResponse(Response):
    """An HTTP answer made from the engine's outputs."""

    def __init__(self, client: EngineClient, exchange: Exchange, delivery: Delivery) -> None:
        self._exchange = exchange
        self._delivery = delivery
        self._replies = Replies(client, exchange)
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; ends early, with the engine told, when the client leaves or the server shuts down."""
        outlet, account = Outlet(send), account_of(scope)
        account.exchange, account.replies = self._exchange, self._replies
        try:
            await while_connected(receive, self._answer(outlet))
        except ClientLeft:
            return
        except asyncio.CancelledError:
            await self._fail(ShuttingDown(), outlet)
            raise

    async def _answer(self, outlet: Outlet) -> None:
        try:
            await self._delivery.deliver(self._replies, outlet)
        except PenstockError as error:
            await self._fail(error, outlet)
        except Exception as error:
            log_failure(error, self._exchange.id)
            await self._fail(error, outlet)

    async def _fail(self, error: Exception, outlet: Outlet) -> None:
        if not outlet.started:
            await outlet.respond(error_response(error, self._exchange.aliases))
            return
        await self._delivery.fail(error_object(error, self._exchange.aliases), self._replies.usage, outlet)


def log_failure(error: Exception, request: str) -> None:
    """Log where our own failure happened. Not its message: that may hold a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s at\n%s", request, type(error).__name__, frames)


def _event(value: JsonObject) -> bytes:
    # JSON escapes every line break inside strings, so one event is always one `data` line.
    return b"data: " + encode(value) + b"\n\n"
