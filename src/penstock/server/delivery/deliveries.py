"""Send an answer: as one JSON object, as server-sent events, or as plain text.

Decides when a response starts (with the engine's first output, so that an error before it has its own status, and time
to first token is honest) and how events are framed (WHATWG HTML, section "Server-sent events"), each with an id from
which a client can resume. The endpoint's formatter decides what an answer or a chunk looks like.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import aclosing
from typing import Protocol

from penstock.api_fields.answers import running_usage_object
from penstock.api_fields.certificate import certificate_field, certificate_headers
from penstock.api_fields.prompt_logprobs import PromptLogprobs, add_prompt_logprobs
from penstock.api_fields.strict_json import JsonObject, encode
from penstock.api_fields.timings import timings_object
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.contract.places import MOST_TOKENS, in_parts
from penstock.server.delivery.catching_up import CatchUp
from penstock.server.delivery.event_ids import ChunkIds, ChunkPosition, Progress
from penstock.server.delivery.output_stream import OutputStream, Transcript
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.failures import json_response
from penstock.server.http.response_writer import EVENT_HEADERS, TEXT_HEADERS, ResponseWriter

__all__ = [
    "NOTHING_MORE",
    "ChunkFormatter",
    "Delivery",
    "EventDelivery",
    "ResponseFormatter",
    "TextDelivery",
    "WholeDelivery",
    "chunk_delivery",
    "whole_delivery",
]

DONE = b"data: [DONE]\n"
BEGINNING = Progress()
NOTHING_MORE: JsonObject = {}


class ResponseFormatter(Protocol):
    """Formats the complete answers of one endpoint."""

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
        """The complete answer, with the fields `more`."""
        ...


class ChunkFormatter(ResponseFormatter, Protocol):
    """Formats the answers of one endpoint, complete or in chunks."""

    def opening(self, index: int) -> JsonObject | None:
        """The chunk that opens a choice, if the endpoint has one."""
        ...

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with more of a choice; None if it would be empty."""
        ...

    def ending(self, finished: ChoiceFinished) -> JsonObject:
        """The chunk that ends a choice."""
        ...

    def usage(self, usage: Usage) -> JsonObject:
        """The chunk with the usage of the whole answer."""
        ...


class Delivery(Protocol):
    """One way of sending an answer."""

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Send the whole answer, including its end."""
        ...

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Report that an answer that has started cannot be completed."""
        ...


class WholeDelivery:
    """The answer in one JSON object."""

    def __init__(
        self,
        formatter: ResponseFormatter,
        num_choices: int,
        timings: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
        certified: bool = False,
    ) -> None:
        self._certified = certified
        self._formatter = formatter
        self._num_choices = num_choices
        self._timings = timings
        self._prompt_logprobs = prompt_logprobs

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Wait for all outputs, then send the answer."""
        transcript = Transcript(self._num_choices)
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                transcript.take(output)
        more = certificate_field(outputs.certificate, wanted=self._certified)
        answer = self._formatter.whole(transcript.choices(), outputs.usage, more)
        if self._prompt_logprobs is not None:
            prompts = [prompt for _, prompt in sorted(outputs.prompts.items())]
            add_prompt_logprobs(answer, self._prompt_logprobs, prompts)
        if self._timings:
            answer["timings"] = _timings(outputs, self._num_choices)
        response = json_response(200, answer)
        response.headers.update(certificate_headers(outputs.certificate))
        await writer.respond(response)

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Do nothing: the answer is sent at once, so it cannot fail after it has started."""


class EventDelivery:
    """The answer as server-sent events, `[DONE]` last; the last chunk has usage, timings and certificate as requested.

    Nothing that the client already has (`ParsedRequest.position`) is sent again.
    """

    def __init__(self, parsed: ParsedRequest, formatter: ChunkFormatter) -> None:
        had = ChunkPosition.read(parsed.position, parsed.num_choices)
        self._parsed = parsed
        self._formatter = formatter
        self._ids = ChunkIds(parsed.id, parsed.num_choices, had)
        self._had = had
        self._behind = {
            choice: CatchUp(choice, progress.place, whole=False)
            for choice, progress in had.choices.items()
            if not progress.ended
        }

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Send the events of each output as it arrives."""
        parsed = self._parsed
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                if (fresh := self._fresh(output) if parsed.position else output) is None:
                    continue
                so_far = outputs.tokens_so_far if parsed.running_usage else None
                for part in self._in_parts(fresh):
                    if events := self._events(part, so_far):
                        await writer.start(EVENT_HEADERS)
                        await writer.write(events)
        await writer.start(EVENT_HEADERS)
        more = certificate_field(outputs.certificate, wanted=parsed.certified)
        if parsed.timings:
            more["timings"] = _timings(outputs, parsed.num_choices)
        closing = b"" if self._had.usage else self._closing(outputs.usage, self._ids.usage, more)
        await writer.write(closing + DONE + self._ids.end + b"\n")
        await writer.end()

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Send the usage so far (first, because the official client stops reading at the error), the error, `[DONE]`.

        They carry the id of the last event before them, so a client that resumes gets the answer from there on.
        """
        here = self._ids.here()
        await writer.write(self._closing(usage, here) + _event(error, here) + DONE + here + b"\n")
        await writer.end()

    def _fresh(self, output: ChoiceDelta | ChoiceFinished) -> ChoiceDelta | ChoiceFinished | None:
        """The part of an output that the client lacks; None if there is none."""
        progress = self._had.choices.get(output.choice, BEGINNING)
        if self._had.usage or progress.ended:
            return None
        catching_up = self._behind.get(output.choice)
        if catching_up is None:
            return output
        if isinstance(output, ChoiceFinished):
            catching_up.check_end()
            return output
        if (parts := catching_up.take(output)) is None:
            return None
        del self._behind[output.choice]
        return parts[1]

    def _in_parts(self, output: ChoiceDelta | ChoiceFinished) -> Iterable[ChoiceDelta | ChoiceFinished]:
        """Split an output into parts whose events have a bounded size."""
        if isinstance(output, ChoiceFinished) or len(output.tokens) <= MOST_TOKENS:  # nearly every one
            return (output,)
        return in_parts(output, self._ids.text_begun(output.choice))

    def _events(self, output: ChoiceDelta | ChoiceFinished, so_far: Usage | None) -> bytes:
        ids, events = self._ids, b""
        said = None if so_far is None else running_usage_object(so_far)
        if ids.begin(output.choice):
            opening = self._formatter.opening(output.choice)
            events += b"" if opening is None else _event(self._with_usage_key(opening, said), ids.here())
        if isinstance(output, ChoiceFinished):
            ids.finish(output.choice)
            return events + _event(self._with_usage_key(self._formatter.ending(output), said), ids.here())
        for part in output.parts():
            chunk = self._formatter.piece(part)
            ids.advance(part)
            events += b"" if chunk is None else _event(self._with_usage_key(chunk, said), ids.here())
        return events

    def _with_usage_key(self, chunk: JsonObject, so_far: JsonObject | None) -> JsonObject:
        return chunk | {"usage": so_far} if self._parsed.include_usage else chunk

    def _closing(self, usage: Usage, id_line: bytes, more: JsonObject = NOTHING_MORE) -> bytes:
        include_usage = self._parsed.include_usage
        if not include_usage and not more:
            return b""
        chunk = self._formatter.usage(usage)
        if not include_usage:
            del chunk["usage"]
        return _event(chunk | more, id_line)


class TextDelivery:
    """The bare text as it is generated, without any framing."""

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Send each delta's text."""
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                if isinstance(output, ChoiceDelta) and output.text:
                    await writer.start(TEXT_HEADERS)
                    await writer.write(output.text.encode())
        await writer.start(TEXT_HEADERS)
        await writer.end()

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Leave the body unfinished: the server closes the connection, so no client takes the text for complete."""


def whole_delivery(parsed: ParsedRequest, formatter: ResponseFormatter) -> WholeDelivery:
    """The delivery of a complete answer to `parsed`, with timings and prompt log probabilities if requested."""
    return WholeDelivery(
        formatter, parsed.num_choices, parsed.timings, parsed.prompt_logprobs, certified=parsed.certified
    )


def chunk_delivery(parsed: ParsedRequest, formatter: ChunkFormatter) -> Delivery:
    """The delivery of the answer to `parsed`: in chunks if it asks for a stream, otherwise complete."""
    if parsed.stream:
        return EventDelivery(parsed, formatter)
    return whole_delivery(parsed, formatter)


def _timings(outputs: OutputStream, num_choices: int) -> JsonObject:
    """The timings of an answer, taken when nothing else of it is missing."""
    return timings_object(outputs.timings, outputs.usage, num_choices, outputs.parts_until(time.monotonic()))


def _event(value: JsonObject, id_line: bytes) -> bytes:
    # JSON escapes every line break inside strings, so one event is always one `data` line.
    return b"data: " + encode(value) + b"\n" + id_line + b"\n"
