"""`POST /v1/chat/completions`: its fields, request parsing, and OpenAI's chat objects for the answer.

`max_tokens` defaults to the rest of the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fastapi import Request, Response

from penstock.api_fields.answers import chat_usage_object, logprob_objects
from penstock.api_fields.certificate import CERTIFICATE
from penstock.api_fields.chat_options import ANSWER_FIELDS, CHAT_SAMPLING_FIELDS, PROMPT_FIELDS, read_chat_options
from penstock.api_fields.conversation import MESSAGES
from penstock.api_fields.fields import BOOLEAN, INTEGER, LABELS, Field, Neutrals, one_of, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.prompt_logprobs import read_prompt_logprobs
from penstock.api_fields.request_options import (
    COMMON_FIELDS,
    HINTS,
    NEUTRAL_COMMON,
    SAFETY_IDENTIFIER,
    STREAM_OPTIONS,
    max_tokens_alias,
    read_options,
    read_stream_usage,
    served_name,
)
from penstock.api_fields.response_format import RESPONSE_FORMAT, response_format_alias
from penstock.api_fields.strict_json import JsonObject
from penstock.api_fields.timings import TIMINGS
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, TokenPiece, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.tools import CallPiece, made_calls
from penstock.server.delivery.deliveries import NOTHING_MORE, chunk_delivery
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving
from penstock.server.http.caller import caller_of
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route
from penstock.server.openai.chat_store import CompletionStore, StoredCompletion, Storing, stored_routes

__all__ = ["CHAT_FIELDS", "NEUTRAL_CHAT", "ChatFormatter", "parse_chat", "routes"]

CHAT_FIELDS = (
    Field("messages", MESSAGES, "The conversation. Text parts of one message are joined by line breaks."),
    Field("max_completion_tokens", INTEGER, "Most tokens to generate; by default the rest of the model's context."),
    Field("logprobs", BOOLEAN, "Whether to return the log probability of each generated token."),
    Field("top_logprobs", INTEGER, "How many top tokens to return at each position; needs logprobs: true."),
    STREAM_OPTIONS,
    *PROMPT_FIELDS,
    *ANSWER_FIELDS,
    TIMINGS,
    CERTIFICATE,
    RESPONSE_FORMAT,
    SAFETY_IDENTIFIER,
    Field(
        "metadata",
        LABELS,
        "Labels of the caller's own: attributes of the request's span, and of what is stored. Not logged.",
    ),
    Field(
        "verbosity",
        one_of("low", "medium", "high"),
        "How long the answer is to be, for models that were trained to read it: none that is served here.",
        hint=True,
    ),
    Field(
        "store",
        BOOLEAN,
        "Keep the completion while there is room: in memory, with --journal on disk too. false when left out.",
    ),
    *HINTS,
    *COMMON_FIELDS,
    *CHAT_SAMPLING_FIELDS,
)


NEUTRAL_CHAT: Neutrals = NEUTRAL_COMMON | {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),  # without functions there is none to call
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "return_prompt_text": (False,),
    "web_search_options": (),
}


def parse_chat(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> ParsedRequest:
    """Parse the request body.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, CHAT_FIELDS, NEUTRAL_CHAT)
    if not card.has_chat_template:
        message = "The served model has no chat template; use /v1/completions."
        raise InvalidParameter("messages", message, code="unsupported_model")
    aliases = max_tokens_alias(given, "max_completion_tokens") | {"logprobs": "top_logprobs"}
    aliases |= response_format_alias(given)
    given["logprobs"] = _num_logprobs(given)
    options = read_options(given, {"max_tokens": None}, aliases, card, limits)
    chat, stream = read_chat_options(given, card, limits), given.get("stream", False)
    usage = read_stream_usage(given)
    request = chat.applied(options.request(response_id, chat.prompt))
    return ParsedRequest(
        id=response_id,
        requests=(replace(request, running_usage=usage.running, certified=given.get("certificate", False)),),
        stream=stream,
        include_usage=usage.at_end,
        running_usage=usage.running,
        timings=given.get("timings", False),
        prompt_logprobs=read_prompt_logprobs(options.params, stream=stream, in_choices=False),
        aliases=aliases | chat.offer.aliases,
        model=model,
        user=options.tenant,
        metadata=given.get("metadata", {}),
    )


def _num_logprobs(given: JsonObject) -> int | None:
    """How many alternatives to each token are requested; None without log probabilities."""
    top: int = given.pop("top_logprobs", 0)
    if given.get("logprobs", False):
        return top
    if top:
        raise InvalidParameter("top_logprobs", "top_logprobs is only allowed together with logprobs: true.")
    return None


def _message_object(delta: ChoiceDelta) -> JsonObject:
    """A complete answer as a message. As at OpenAI, an answer that consists of calls alone has no content."""
    calls = _call_objects(delta.calls)
    message: JsonObject = {"role": "assistant", "content": delta.text if delta.text or not calls else None}
    message["refusal"] = None
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _piece_object(piece: CallPiece) -> JsonObject:
    """A piece of a call, for the delta of a chat stream."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _call_objects(pieces: Iterable[CallPiece]) -> list[JsonObject]:
    """Complete calls, for a chat message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in made_calls(pieces)
    ]


class ChatFormatter:
    """OpenAI's `chat.completion` and `chat.completion.chunk`. One instance per answer."""

    def __init__(self, response_id: str, model: str, created: int, logprobs: bool) -> None:
        self._head = {"id": response_id, "created": created, "model": model, "system_fingerprint": None}
        self._logprobs = logprobs

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
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
        said = {"object": "chat.completion", "choices": objects, "usage": chat_usage_object(usage)}
        return {**self._head, **said, **more}

    def opening(self, index: int) -> JsonObject:
        """The chunk with the role; sent together with the choice's first token."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with text, reasoning or pieces of calls; None if it would be empty."""
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
        """The chunk with the usage; it has no choices."""
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


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /v1/chat/completions`, and the routes of stored completions."""
    limits = serving.access.limits
    store = CompletionStore(limits.max_stored_responses, limits.max_stored_bytes, serving.answers)
    serving.memory.watch("stored_completions", lambda: store.bytes)

    async def chat_completions(http_request: Request) -> Response:
        """Continue a conversation, as OpenAI's endpoint of this name."""
        parsed, body = await serving.accept(
            http_request,
            "chatcmpl-",
            lambda body, response_id: (parse_chat(body, response_id, serving.card_now, serving.limits), body),
        )
        logprobs = parsed.requests[0].sampling.has("logprobs")
        formatter = ChatFormatter(parsed.id, parsed.model, parsed.created, logprobs)
        delivery = chunk_delivery(parsed, formatter)
        if body.get("store"):
            tenant = caller_of(http_request.scope).name
            entry = StoredCompletion(tenant, {"metadata": dict(parsed.metadata)}, tuple(body["messages"]))
            delivery = Storing(delivery, formatter, store, entry, parsed.num_choices, parsed.certified)
        return serving.respond(parsed, delivery)

    body = request_body(fitted(CHAT_FIELDS, serving.card), NEUTRAL_CHAT, "messages")
    described = answers("ChatCompletion", stream="text/event-stream")
    create = Route("POST", "/v1/chat/completions", chat_completions, described, body, queued=True)
    return (create, *stored_routes(serving, store))
