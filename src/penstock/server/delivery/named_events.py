"""Answers as server-sent events that carry their names, as Anthropic's messages and OpenAI's responses have them.

Decides when events are sent (the opening with the engine's first output, so that an error before it has its own status)
and how they are framed: `event:` repeats the object's `type`. What the events say is decided by the endpoint's
`EventFormatter`. There is no `[DONE]`: the last event says that it is the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Protocol

from penstock.api_fields.strict_json import JsonObject, encode
from penstock.contract.errors import EngineFault
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.server.delivery.deliveries import ResponseFormatter
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.http.response_writer import EVENT_HEADERS, ResponseWriter

__all__ = ["EventFormatter", "NamedEventDelivery", "named_event"]


class EventFormatter(ResponseFormatter, Protocol):
    """How one endpoint tells the answer of one choice, whole or in events. One instance an answer: it may count."""

    def opening(self) -> Iterable[JsonObject]:
        """The events before any text."""
        ...

    def piece(self, delta: ChoiceDelta) -> Iterable[JsonObject]:
        """The events of more text; none where it would say nothing."""
        ...

    def closing(self, finished: ChoiceFinished, usage: Usage) -> Iterable[JsonObject]:
        """The events of a complete answer's end."""
        ...

    def failing(self, error: JsonObject, usage: Usage) -> Iterable[JsonObject]:
        """The events of an answer that cannot be completed; `error` is OpenAI's error object."""
        ...


class NamedEventDelivery:
    """See the module."""

    def __init__(self, formatter: EventFormatter) -> None:
        self._formatter = formatter

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """One event or more for each output, as it comes."""
        finished: ChoiceFinished | None = None
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                await self._open(writer)
                if isinstance(output, ChoiceFinished):
                    finished = output
                else:
                    await _write(writer, self._formatter.piece(output))
        if finished is None:
            raise EngineFault("The engine ended the answer before it was complete.")
        await _write(writer, self._formatter.closing(finished, outputs.usage))
        await writer.end()

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Say so, in the endpoint's own way."""
        await _write(writer, self._formatter.failing(error, usage))
        await writer.end()

    async def _open(self, writer: ResponseWriter) -> None:
        if not writer.started:
            await writer.start(EVENT_HEADERS)
            await _write(writer, self._formatter.opening())


def named_event(event: JsonObject) -> bytes:
    """One event, framed."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"


async def _write(writer: ResponseWriter, events: Iterable[JsonObject]) -> None:
    framed = b"".join(map(named_event, events))
    if framed:
        await writer.write(framed)
