"""Sending an answer: whole as JSON, piece by piece as server-sent events, or as plain text.

Decides when an answer starts (with the engine's first output, so that an error before it has its own status, and time
to first token is honest) and how events are framed (WHATWG HTML, section "Server-sent events"). What an answer or a
chunk looks like is decided by the endpoint's formatter.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Protocol

from penstock.api_fields.answers import running_usage_object
from penstock.api_fields.prompt_logprobs import PromptLogprobs, add_prompt_logprobs
from penstock.api_fields.strict_json import JsonObject, encode
from penstock.api_fields.timings import timings_object
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.server.delivery.output_stream import OutputStream, Transcript
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.failures import json_response
from penstock.server.http.response_writer import EVENT_HEADERS, TEXT_HEADERS, ResponseWriter

__all__ = [
    "ChunkFormatter",
    "Delivery",
    "EventDelivery",
    "ResponseFormatter",
    "TextDelivery",
    "WholeDelivery",
    "chunk_delivery",
    "whole_delivery",
]

DONE = b"data: [DONE]\n\n"


class ResponseFormatter(Protocol):
    """How one endpoint writes a whole answer."""

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The whole answer."""
        ...


class ChunkFormatter(ResponseFormatter, Protocol):
    """How one endpoint writes its answers, whole or in chunks. Each answer has an instance, which may keep state."""

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


class Delivery(Protocol):
    """One way of sending an answer."""

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Send everything, the end included."""
        ...

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Say that the answer, which has started, cannot be completed."""
        ...


class WholeDelivery:
    """The answer in one JSON object."""

    def __init__(
        self,
        formatter: ResponseFormatter,
        num_choices: int,
        timings: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._formatter = formatter
        self._num_choices = num_choices
        self._timings = timings
        self._prompt_logprobs = prompt_logprobs

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Wait for everything, then send it."""
        transcript = Transcript(self._num_choices)
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                transcript.take(output)
        answer = self._formatter.whole(transcript.choices(), outputs.usage)
        if self._prompt_logprobs is not None:
            prompts = [prompt for _, prompt in sorted(outputs.prompts.items())]
            add_prompt_logprobs(answer, self._prompt_logprobs, prompts)
        if self._timings:
            answer["timings"] = timings_object(outputs.timings, outputs.usage, self._num_choices)
        await writer.respond(json_response(200, answer))

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Nothing: a whole answer is sent at once, so it cannot fail after it has started."""


class EventDelivery:
    """The answer as server-sent events, `[DONE]` last; usage and timings, where asked for, are in the last chunk."""

    def __init__(
        self, formatter: ChunkFormatter, include_usage: bool, timings: bool = False, running_usage: bool = False
    ) -> None:
        self._formatter = formatter
        self._include_usage = include_usage
        self._running_usage = running_usage
        self._timings = timings
        self._open: set[int] = set()

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """One event or more for each output, as it comes."""
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                events = self._events(output, outputs.tokens_so_far if self._running_usage else None)
                if events:
                    await writer.start(EVENT_HEADERS)
                    await writer.write(events)
        await writer.start(EVENT_HEADERS)
        timings = timings_object(outputs.timings, outputs.usage, len(self._open)) if self._timings else None
        await writer.write(self._closing(outputs.usage, timings) + DONE)
        await writer.end()

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """The usage so far (the official client stops reading at the error), the error, `[DONE]`."""
        await writer.write(self._closing(usage) + _event(error) + DONE)
        await writer.end()

    def _events(self, output: ChoiceDelta | ChoiceFinished, so_far: Usage | None) -> bytes:
        opening = None if output.choice in self._open else self._formatter.opening(output.choice)
        self._open.add(output.choice)
        if isinstance(output, ChoiceDelta):
            chunks = [self._formatter.piece(delta) for delta in output.parts()]
        else:
            chunks = [self._formatter.ending(output)]
        said = None if so_far is None else running_usage_object(so_far)
        return b"".join(_event(self._with_usage_key(each, said)) for each in (opening, *chunks) if each is not None)

    def _with_usage_key(self, chunk: JsonObject, so_far: JsonObject | None) -> JsonObject:
        return chunk | {"usage": so_far} if self._include_usage else chunk

    def _closing(self, usage: Usage, timings: JsonObject | None = None) -> bytes:
        if not self._include_usage and timings is None:
            return b""
        chunk = self._formatter.usage(usage)
        if not self._include_usage:
            del chunk["usage"]
        return _event(chunk if timings is None else chunk | {"timings": timings})


class TextDelivery:
    """The bare text as it comes, without any framing."""

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Each delta's text."""
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                if isinstance(output, ChoiceDelta) and output.text:
                    await writer.start(TEXT_HEADERS)
                    await writer.write(output.text.encode())
        await writer.start(TEXT_HEADERS)
        await writer.end()

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Leave the body unended: the server then cuts the connection, and no client takes the text for complete."""


def whole_delivery(parsed: ParsedRequest, formatter: ResponseFormatter) -> WholeDelivery:
    """The whole answer to `parsed`, with timings and prompt log probabilities where it asks for them."""
    return WholeDelivery(formatter, parsed.num_choices, parsed.timings, parsed.prompt_logprobs)


def chunk_delivery(parsed: ParsedRequest, formatter: ChunkFormatter) -> Delivery:
    """The answer to `parsed`: in chunks where it asks for a stream, else whole."""
    if parsed.stream:
        return EventDelivery(formatter, parsed.include_usage, parsed.timings, parsed.running_usage)
    return whole_delivery(parsed, formatter)


def _event(value: JsonObject) -> bytes:
    # JSON escapes every line break inside strings, so one event is always one `data` line.
    return b"data: " + encode(value) + b"\n\n"
