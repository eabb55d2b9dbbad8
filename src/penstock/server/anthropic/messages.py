"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's answers, complete or as events.

The events come in the order that Anthropic's clients expect: message_start; each content block opened, filled and
closed; message_delta with the stop reason and the usage; message_stop. As at Anthropic, cached prompt tokens are
counted separately from the others; the prompt is the sum of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import Request, Response

from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import RequestError
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, Usage
from penstock.contract.places import START
from penstock.contract.tools import CallPiece, ToolCall
from penstock.server.anthropic.errors import anthropic_error
from penstock.server.anthropic.messages_request import (
    COUNT_FIELDS,
    MESSAGES_FIELDS,
    NEUTRAL_COUNT,
    NEUTRAL_MESSAGES,
    parse_count,
    parse_messages,
)
from penstock.server.delivery.call_arguments import arguments_object, spoken_and_called
from penstock.server.delivery.deliveries import NOTHING_MORE, Delivery, whole_delivery
from penstock.server.delivery.named_events import NamedEventDelivery
from penstock.server.delivery.serving import Serving
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import error_response, json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["MessageFormatter", "routes"]

STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", FinishReason.ABORT: "end_turn"}
SERVER_FAILED = 500


class MessageFormatter:
    """Anthropic's `message`. One instance per answer.

    Blocks keep the order in which the model wrote them: reasoning first, then text and calls. Each call is a block, and
    so is the text between two calls. A stream has the same content as a complete answer.

    Args:
        prompt_tokens: how many tokens the prompt has, for a stream's opening event.

    Attributes:
        place: how much of the choice the events so far cover; tokens are not counted.
    """

    def __init__(self, response_id: str, model: str, prompt_tokens: int = 0) -> None:
        self._head = {"id": response_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._open = ""  # the type of the block that is being sent
        self._blocks = 0  # blocks opened so far
        self._told = 0  # characters of text so far
        self._called = False
        self.place = START

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
        """The `message` object."""
        ((delta, finished),) = choices
        content = [_block("thinking", delta.reasoning)] if delta.reasoning else []
        content += [
            _block("text", part) if isinstance(part, str) else _call_block(part, arguments_object(part.arguments))
            for part in spoken_and_called(delta)
        ]
        content = content or [_block("text", "")]
        ending = _ending(finished, bool(delta.calls))
        return self._head | {"content": content} | ending | {"usage": _usage(usage)} | more

    def opening(self) -> Iterator[JsonObject]:
        """The empty message."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        usage = _usage(Usage(prompt_tokens=self._prompt_tokens))
        yield {"type": "message_start", "message": self._head | {"content": []} | nothing | {"usage": usage}}

    def piece(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        """The events for more reasoning, text, or call arguments."""
        if delta.reasoning:
            yield from self._into("thinking")
            self.place = self.place.plus(reasoning=len(delta.reasoning))
            yield self._more({"type": "thinking_delta", "thinking": delta.reasoning})
        for part in delta.in_order(self._told):
            if isinstance(part, CallPiece):
                yield from self._call(part)
            else:
                yield from self._into("text")
                self.place = self.place.plus(text=len(part))
                yield self._more({"type": "text_delta", "text": part})
        self._told += len(delta.text)

    def _call(self, piece: CallPiece) -> Iterator[JsonObject]:
        if piece.id:
            self._called = True
            yield from self._stop()
            self.place = self.place.plus(calls=1)
            yield from self._start(_call_block(ToolCall(piece.id, piece.name, ""), {}))
        if piece.arguments:
            self.place = self.place.plus(calls=len(piece.arguments))
            yield self._more({"type": "input_json_delta", "partial_json": piece.arguments})

    def closing(self, finished: ChoiceFinished, usage: Usage, more: JsonObject = NOTHING_MORE) -> Iterator[JsonObject]:
        """The events that end the last block and the message."""
        if not self._blocks:
            yield from self._into("text")
        yield from self._stop()
        yield {"type": "message_delta", "delta": _ending(finished, self._called), "usage": _usage(usage)}
        yield {"type": "message_stop"} | more

    def failing(self, error: JsonObject, usage: Usage) -> Iterable[JsonObject]:  # noqa: ARG002 (EventFormatter's signature)
        """Anthropic's error event, which its clients raise as an exception."""
        return [anthropic_error(error, SERVER_FAILED)]

    def _into(self, kind: str) -> Iterator[JsonObject]:
        """The events that close the open block and open one of this kind, unless such a block is open."""
        if self._open != kind:
            yield from self._stop()
            yield from self._start(_block(kind, ""))

    def _start(self, block: JsonObject) -> Iterator[JsonObject]:
        self._open = block["type"]
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _more(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> Iterator[JsonObject]:
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._blocks - 1}


def _block(kind: str, text: str) -> JsonObject:
    # At Anthropic, the signature proves that reasoning is its own. Nothing to prove here, but clients expect the field.
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _call_block(call: ToolCall, arguments: JsonObject) -> JsonObject:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ending(finished: ChoiceFinished, called: bool) -> JsonObject:
    if called and finished.reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finished.reason is FinishReason.STOP and isinstance(finished.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    return {"stop_reason": STOP_REASONS[finished.reason], "stop_sequence": None}


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /v1/messages` and `POST /v1/messages/count_tokens`."""
    client, limits = serving.client, serving.limits
    extra = request_body(fitted(MESSAGES_FIELDS, serving.card, {}), NEUTRAL_MESSAGES, "messages", "max_tokens")
    described = answers("AnthropicMessage", stream="text/event-stream", error="AnthropicError")

    async def messages(http_request: Request) -> Response:
        """Continue a conversation, as Anthropic's endpoint of this name."""
        parsed = await serving.parse(http_request, "msg_", parse_messages)
        delivery: Delivery
        if parsed.stream:
            try:
                prompt = await client.tokenize(parsed.requests[0].prompt, caller_of(http_request.scope).name)
            except RequestError as error:
                return error_response(error, parsed.aliases)
            delivery = NamedEventDelivery(parsed, MessageFormatter(parsed.id, parsed.model, len(prompt.token_ids)))
        else:
            delivery = whole_delivery(parsed, MessageFormatter(parsed.id, parsed.model))
        return serving.respond(parsed, delivery)

    count_extra = request_body(fitted(COUNT_FIELDS, serving.card), NEUTRAL_COUNT, "messages")
    count_answers = answers("AnthropicCount", error="AnthropicError")

    async def count_tokens(http_request: Request) -> Response:
        """How many tokens a conversation has, as Anthropic's endpoint of this name."""
        chat = await serving.read(http_request, lambda body: parse_count(body, serving.card_now, limits))
        try:
            prompt = await client.tokenize(chat.prompt, caller_of(http_request.scope).name)
        except RequestError as error:
            return error_response(error, chat.offer.aliases)
        return json_response(200, {"input_tokens": len(prompt.token_ids)})

    return (
        Route("POST", "/v1/messages", messages, described, extra, queued=True),
        Route("POST", "/v1/messages/count_tokens", count_tokens, count_answers, count_extra),
    )
