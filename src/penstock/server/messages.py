"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's answers, whole and in events, and their routes.

Decides the order of events that Anthropic's clients expect: message_start, one content block opened, filled and closed,
message_delta with the reason and the usage, message_stop. Cached prompt tokens are told apart from the others, as
Anthropic does: the two add up to the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import FastAPI, Request, Response

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, Usage
from penstock.server.anthropic_errors import anthropic_error
from penstock.server.delivery import Delivery, EngineResponse, WholeDelivery
from penstock.server.failures import json_response
from penstock.server.messages_request import (
    COUNT_FIELDS,
    MESSAGES_FIELDS,
    NEUTRAL_COUNT,
    NEUTRAL_MESSAGES,
    parse_count,
    parse_messages,
)
from penstock.server.named_events import NamedEventDelivery
from penstock.server.openapi import answers, request_body
from penstock.server.serving import Serving
from penstock.server.strict_json import JsonObject

__all__ = ["MessageScript", "add_routes"]

STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", FinishReason.ABORT: "end_turn"}
SERVER_FAILED = 500


class MessageScript:
    """Anthropic's `message`. One instance an answer.

    Args:
        prompt_tokens: of the prompt, for the opening event; a whole answer knows them at its end.
    """

    def __init__(self, exchange_id: str, model: str, prompt_tokens: int = 0) -> None:
        self._head = {"id": exchange_id, "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The `message` object."""
        ((delta, finished),) = choices
        content = [{"type": "text", "text": delta.text}]
        return self._head | {"content": content} | _ending(finished) | {"usage": _usage(usage)}

    def opening(self) -> Iterator[JsonObject]:
        """The empty message, and its one block."""
        nothing = {"stop_reason": None, "stop_sequence": None}
        usage = _usage(Usage(prompt_tokens=self._prompt_tokens))
        yield {"type": "message_start", "message": self._head | {"content": []} | nothing | {"usage": usage}}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}

    def piece(self, delta: ChoiceDelta) -> Iterator[JsonObject]:
        """More text of the block."""
        if delta.text:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": delta.text}}

    def closing(self, finished: ChoiceFinished, usage: Usage) -> Iterator[JsonObject]:
        """The end of the block and of the message."""
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": _ending(finished), "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def failing(self, error: JsonObject, usage: Usage) -> Iterable[JsonObject]:  # noqa: ARG002 (Script's signature)
        """Anthropic's error event, which its clients raise."""
        return [anthropic_error(error, SERVER_FAILED)]


def _ending(finished: ChoiceFinished) -> JsonObject:
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


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /v1/messages` and `POST /v1/messages/count_tokens`."""
    client, card, limits = serving.client, serving.card, serving.limits
    extra = request_body(MESSAGES_FIELDS, NEUTRAL_MESSAGES, "messages", "max_tokens")
    described = answers("AnthropicMessage", stream="text/event-stream", error="AnthropicError")

    @app.post("/v1/messages", openapi_extra=extra, responses=described, response_class=Response)
    async def messages(request: Request) -> Response:
        """Continue a conversation, as Anthropic's endpoint of this name."""
        exchange = await serving.exchange(request, "msg_", parse_messages)
        delivery: Delivery
        if exchange.stream:
            prompt = await client.tokenize(exchange.asks[0].prompt)
            delivery = NamedEventDelivery(MessageScript(exchange.id, card.name, len(prompt.token_ids)))
        else:
            delivery = WholeDelivery(MessageScript(exchange.id, card.name), exchange.num_choices)
        return EngineResponse(client, exchange, delivery)

    count_extra = request_body(COUNT_FIELDS, NEUTRAL_COUNT, "messages")
    count_answers = answers("AnthropicCount", error="AnthropicError")

    @app.post("/v1/messages/count_tokens", openapi_extra=count_extra, responses=count_answers, response_class=Response)
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has, as Anthropic's endpoint of this name."""
        prompt = await serving.read(request, lambda body: parse_count(body, card, limits))
        return json_response(200, {"input_tokens": len((await client.tokenize(prompt)).token_ids)})
