"""Send answers as named server-sent events, as in Anthropic's Messages API and OpenAI's Responses API.

Decides when events are sent (the opening with the engine's first output, so that an error before it has its own status)
and how they are framed: `event:` repeats the object's `type`. The endpoint's `EventFormatter` decides what the events
say. There is no `[DONE]`: the last event says that it is the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import aclosing
from itertools import chain
from typing import Protocol

from penstock.api_fields.certificate import certificate_field
from penstock.api_fields.strict_json import JsonObject, encode
from penstock.contract.errors import EngineFault
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.contract.places import MOST_TOKENS, Place, in_parts
from penstock.server.delivery.catching_up import CatchUp
from penstock.server.delivery.deliveries import NOTHING_MORE, ResponseFormatter
from penstock.server.delivery.event_ids import END, NamedPosition, id_line
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.response_writer import EVENT_HEADERS, ResponseWriter

__all__ = ["UNKNOWN", "EventFormatter", "NamedEventDelivery", "named_event"]

UNKNOWN = "unknown"
"""The position of an event that was sent before this server began."""


class EventFormatter(ResponseFormatter, Protocol):
    """Formats an answer of one choice, complete or in events. One instance per answer: it may keep state."""

    @property
    def place(self) -> Place:
        """How much of the choice the events so far cover. An event that does not move it is structure, not content."""
        ...

    def opening(self) -> Iterable[JsonObject]:
        """The events before any text."""
        ...

    def piece(self, delta: ChoiceDelta) -> Iterable[JsonObject]:
        """The events for more of the choice; none if they would be empty."""
        ...

    def closing(self, finished: ChoiceFinished, usage: Usage, more: JsonObject = NOTHING_MORE) -> Iterable[JsonObject]:
        """The events that end a complete answer, the last one with the answer's fields `more`."""
        ...

    def failing(self, error: JsonObject, usage: Usage) -> Iterable[JsonObject]:
        """The events that end an answer that cannot be completed; `error` is OpenAI's error object."""
        ...


class NamedEventDelivery:
    """The answer as named events. Nothing that the client already has (`ParsedRequest.position`) is sent again.

    Args:
        positions: the positions of the events so far, by number; extended as events are sent. None if not wanted.
    """

    def __init__(self, parsed: ParsedRequest, formatter: EventFormatter, positions: list[str] | None = None) -> None:
        self._formatter = formatter
        self._positions = positions
        self._id = parsed.id
        self._certified = parsed.certified
        self._had = NamedPosition.read(parsed.position)
        self._behind = CatchUp(0, self._had.place, whole=True) if parsed.position else None
        self._now = NamedPosition(events=self._had.events)
        if positions is not None and parsed.position != END:
            positions[:] = positions[: self._had.events] + [UNKNOWN] * (self._had.events - len(positions))
        self._opened = False

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Send the events of each output as it arrives."""
        finished: ChoiceFinished | None = None
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                if isinstance(output, ChoiceFinished):
                    finished = output
                elif self._behind is None:
                    await self._tell(writer, output)
                elif (parts := self._behind.take(output)) is not None:
                    self._behind = None
                    await self._send(writer, self._fresh(self._told(parts[0]), had=True))
                    await self._tell(writer, parts[1])
        if finished is None:
            raise EngineFault("The engine ended the answer before it was complete.")
        if self._behind is not None:
            self._behind.check_end()
        more = certificate_field(outputs.certificate, wanted=self._certified)
        closing = chain(self._told(), self._formatter.closing(finished, outputs.usage, more))
        *before, (last, _) = self._fresh(closing)
        await self._send(writer, (*before, (last, END)))
        if self._positions is not None:
            self._positions[-1] = END
        await writer.end()

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Send the endpoint's failure events. A client that resumes from their id gets the answer from there on."""
        here, number = str(self._now), self._now.events
        events = enumerate(self._formatter.failing(error, usage), start=number)
        await self._send(writer, ((_numbered(event, at), here) for at, event in events))
        await writer.end()

    async def _tell(self, writer: ResponseWriter, delta: ChoiceDelta) -> None:
        parts = in_parts(delta, self._formatter.place.text) if len(delta.tokens) > MOST_TOKENS else (delta,)
        for part in parts:
            await self._send(writer, self._fresh(self._told(part)))

    async def _send(self, writer: ResponseWriter, events: Iterable[tuple[JsonObject, str]]) -> None:
        """Send events, each with its position."""
        framed = b"".join(named_event(event, id_line(self._id, position)) for event, position in events)
        if framed:
            await writer.start(EVENT_HEADERS)
            await writer.write(framed)

    def _told(self, delta: ChoiceDelta | None = None) -> Iterator[JsonObject]:
        """The events of a delta, if one is given; the first call puts the opening events before them."""
        if not self._opened:
            self._opened = True
            yield from self._formatter.opening()
        if delta is not None:
            yield from self._formatter.piece(delta)

    def _fresh(self, events: Iterable[JsonObject], *, had: bool = False) -> Iterator[tuple[JsonObject, str]]:
        """The events that the client lacks, each with its position.

        Args:
            events: must be made lazily, because the formatter's place is that of the last event made.
            had: whether the client already has everything that they add to the choice.
        """
        for event in events:
            place = self._formatter.place
            says_more = place != self._now.place
            structure = self._now.structure + (not says_more)
            lacking = not had if says_more else structure > self._had.structure
            self._now = NamedPosition(place, structure, self._now.events + lacking)
            if lacking:
                position = str(self._now)
                if self._positions is not None:
                    self._positions.append(position)
                yield _numbered(event, self._now.events - 1), position


def named_event(event: JsonObject, id_line: bytes = b"") -> bytes:
    """One event, framed."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n" + id_line + b"\n"


def _numbered(event: JsonObject, number: int) -> JsonObject:
    """The event with its number in the stream, if its kind has one."""
    return event if event.get("sequence_number", number) == number else event | {"sequence_number": number}
