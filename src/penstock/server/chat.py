"""`POST /v1/chat/completions`: from a body to an `Exchange`, and from outputs to OpenAI's chat objects.

Decides the endpoint's fields and defaults (the rest of the context as `max_tokens`). Knows neither
templates nor HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, TokenPiece, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.tools import CallPiece, made_calls
from penstock.server.answers import chat_usage_object, logprob_objects
from penstock.server.chat_terms import ANSWER_FIELDS, PROMPT_FIELDS, read_chat_terms
from penstock.server.conversation import MESSAGES
from penstock.server.exchange import Exchange
from penstock.server.fields import BOOLEAN, INTEGER, LABELS, NEUTRAL_CHAT, TEXT, Field, read_fields
from penstock.server.parameters import (
    COMMON_FIELDS,
    STREAM_OPTIONS,
    check_model,
    check_stream_options,
    max_tokens_alias,
    read_terms,
    sampling_fields,
)
from penstock.server.prompt_logprobs import read_prompt_logprobs
from penstock.server.response_format import RESPONSE_FORMAT, response_format_alias
from penstock.server.strict_json import JsonObject
from penstock.server.timings import TIMINGS

__all__ = ["CHAT_FIELDS", "ChatShape", "parse_chat"]

CHAT_FIELDS = (
    Field("messages", MESSAGES, "The conversation. Text parts of one message are joined by line breaks."),
    Field("max_completion_tokens", INTEGER, "Most tokens to generate; by default the rest of the model's context."),
    Field("logprobs", BOOLEAN, "Whether to return the log probability of each generated token."),
    Field("top_logprobs", INTEGER, "How many of the likeliest tokens to return in each place; needs logprobs: true."),
    STREAM_OPTIONS,
    *PROMPT_FIELDS,
    *ANSWER_FIELDS,
    TIMINGS,
    RESPONSE_FORMAT,
    Field("safety_identifier", TEXT, "As user; user wins where both are given."),
    Field("metadata", LABELS, "Labels of the caller's own. Checked, then forgotten: this server stores no requests."),
    *COMMON_FIELDS,
    *sampling_fields("best_of", "logprobs"),
)


def parse_chat(body: JsonObject, exchange_id: str, card: ModelCard, limits: RequestLimits) -> Exchange:
    """The exchange that `body` asks for.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, CHAT_FIELDS, NEUTRAL_CHAT)
    if not card.has_chat_template:
        message = "The served model has no chat template; use /v1/completions."
        raise InvalidParameter("messages", message, code="unsupported_model")
    aliases = max_tokens_alias(given, "max_completion_tokens") | {"logprobs": "top_logprobs"}
    aliases |= response_format_alias(given)
    given["logprobs"] = _num_logprobs(given)
    terms = read_terms(given, {"max_tokens": None}, aliases, card, limits)
    chat, stream = read_chat_terms(given, card, limits), given.get("stream", False)
    return Exchange(
        id=exchange_id,
        asks=(chat.applied(terms.ask(exchange_id, chat.prompt)),),
        stream=stream,
        include_usage=check_stream_options(given),
        timings=given.get("timings", False),
        prompt_logprobs=read_prompt_logprobs(terms.params, stream=stream, in_choices=False),
        aliases=aliases | chat.offer.aliases,
    )


def _num_logprobs(given: JsonObject) -> int | None:
    """How many alternatives to each token are wanted, if log probabilities are wanted at all."""
    top: int = given.pop("top_logprobs", 0)
    if given.get("logprobs", False):
        return top
    if top:
        raise InvalidParameter("top_logprobs", "top_logprobs is only allowed together with logprobs: true.")
    return None


def _message_object(delta: ChoiceDelta) -> JsonObject:
    """A whole answer as a message; as in OpenAI's, an answer that only calls has no content."""
    calls = _call_objects(delta.calls)
    message: JsonObject = {"role": "assistant", "content": delta.text if delta.text or not calls else None}
    message["refusal"] = None
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _piece_object(piece: CallPiece) -> JsonObject:
    """A piece of a call as a chat stream's delta has it."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _call_objects(pieces: Iterable[CallPiece]) -> list[JsonObject]:
    """Whole calls as a chat message has them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in made_calls(pieces)
    ]


class ChatShape:
    """OpenAI's `chat.completion` and `chat.completion.chunk`. One instance an answer."""

    def __init__(self, exchange_id: str, model: str, created: int, logprobs: bool) -> None:
        self._head = {"id": exchange_id, "created": created, "model": model, "system_fingerprint": None}
        self._logprobs = logprobs

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """A `chat.completion`."""
        objects = [
            {
                "index": delta.choice,
                "message": _message_object(delta),
                "logprobs": self._logprobs_object(delta.tokens),
                "finish_reason": finished.reason.value,
                "stop_reason": finished.stop,
            }
            for delta, finished in choices
        ]
        return {**self._head, "object": "chat.completion", "choices": objects, "usage": chat_usage_object(usage)}

    def opening(self, index: int) -> JsonObject:
        """The chunk with the role; sent together with the choice's first token."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with text, reasoning or a piece of a call."""
        said: JsonObject = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.text or (self._logprobs and delta.tokens and not said):
            said["content"] = delta.text
        if delta.calls:
            said["tool_calls"] = [_piece_object(piece) for piece in delta.calls]
        return self._chunk(delta.choice, said, logprobs=self._logprobs_object(delta.tokens)) if said else None

    def ending(self, finished: ChoiceFinished) -> JsonObject:
        """The chunk with the finish reason."""
        chunk = self._chunk(finished.choice, {}, finish_reason=finished.reason.value)
        chunk["choices"][0]["stop_reason"] = finished.stop
        return chunk

    def usage(self, usage: Usage) -> JsonObject:
        """The chunk with the usage, which belongs to no choice."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": chat_usage_object(usage)}

    def _chunk(
        self, index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs_object(self, tokens: tuple[TokenPiece, ...]) -> JsonObject | None:
        if not self._logprobs:
            return None
        return {"content": logprob_objects(tokens), "refusal": None}
