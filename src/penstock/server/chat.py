"""`POST /v1/chat/completions`: from a body to an `Exchange`, and from outputs to OpenAI's chat objects.

Decides the conversation's shape and the endpoint's defaults (the rest of the context as `max_tokens`). Knows neither
templates nor HTTP.
"""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, TokenPiece, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, Message
from penstock.server.answers import finite_logprob, usage_object
from penstock.server.exchange import Exchange
from penstock.server.fields import (
    BOOLEAN,
    INTEGER,
    LABELS,
    NEUTRAL_CHAT,
    NEUTRAL_MESSAGE,
    NEUTRAL_PART,
    TEXT,
    Field,
    Kind,
    join_path,
    read_fields,
)
from penstock.server.parameters import (
    COMMON_FIELDS,
    STREAM_OPTIONS,
    check_model,
    check_prompt_chars,
    check_stream_options,
    max_tokens_alias,
    read_terms,
    sampling_fields,
)
from penstock.server.response_format import RESPONSE_FORMAT, response_format_alias
from penstock.server.strict_json import JsonObject

__all__ = ["CHAT_FIELDS", "ChatShape", "parse_chat"]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of the API -> roles that chat templates know."""

UNSUPPORTED_ROLES = ("tool", "function")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
MESSAGES = Kind(
    "a list of messages",
    {"type": "array", "items": _MESSAGE, "minItems": 1},
    lambda value: isinstance(value, list),
)
_CONTENT = Kind(
    "a string or a list of text parts",
    {},
    lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value)),
)

CHAT_FIELDS = (
    Field("messages", MESSAGES, "The conversation. Text parts of one message are joined by line breaks."),
    Field("max_completion_tokens", INTEGER, "Most tokens to generate; by default the rest of the model's context."),
    Field("logprobs", BOOLEAN, "Whether to return the log probability of each generated token."),
    STREAM_OPTIONS,
    RESPONSE_FORMAT,
    Field("safety_identifier", TEXT, "As user; user wins where both are given."),
    Field("metadata", LABELS, "Labels of the caller's own. Checked, then forgotten: this server stores no requests."),
    *COMMON_FIELDS,
    *sampling_fields("logprobs"),
)
_MESSAGE_FIELDS = (Field("role", TEXT, "Who speaks."), Field("content", _CONTENT, "What is said."))
_PART_FIELDS = (Field("type", TEXT, "Always text."), Field("text", TEXT, "The text."))


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
    aliases = max_tokens_alias(given, "max_completion_tokens")
    aliases |= response_format_alias(given)
    given["logprobs"] = 0 if given.get("logprobs", False) else None
    terms = read_terms(given, {"max_tokens": None}, aliases, card, limits)
    prompt = ChatPrompt(_messages(given, card, limits))
    return Exchange(
        id=exchange_id,
        asks=(terms.ask(exchange_id, prompt),),
        stream=given.get("stream", False),
        include_usage=check_stream_options(given),
        aliases=aliases,
    )


def _messages(given: JsonObject, card: ModelCard, limits: RequestLimits) -> tuple[Message, ...]:
    values: list[Any] = given.get("messages", [])
    if not values:
        raise InvalidParameter("messages", "messages must hold at least one message.", code="missing_value")
    if len(values) > limits.max_messages:
        raise InvalidParameter("messages", f"messages may hold at most {limits.max_messages} messages.")
    messages = tuple(_message(value, f"messages.{index}") for index, value in enumerate(values))
    check_prompt_chars(sum(len(message.content) for message in messages), "messages", card, limits)
    return messages


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    given = read_fields(value, _MESSAGE_FIELDS, NEUTRAL_MESSAGE, path)
    for name in ("role", "content"):
        if name not in given:
            where = join_path(path, name)
            raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    return Message(
        _role(given["role"], join_path(path, "role")), _content(given["content"], join_path(path, "content"))
    )


def _role(role: str, path: str) -> str:
    if role in UNSUPPORTED_ROLES:
        message = f"{path}: messages of role {role!r} are not supported, as this server calls no tools."
        raise InvalidParameter(path, message, code="unsupported_parameter")
    if role not in ROLES:
        raise InvalidParameter(path, f"{path} must be one of {', '.join(ROLES)}.")
    return ROLES[role]


def _content(content: str | list[Any], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, join_path(path, index)) for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    if part.get("type") != "text":
        where = join_path(path, "type")
        raise InvalidParameter(
            where, f"{where}: only parts of type 'text' are supported.", code="unsupported_parameter"
        )
    given = read_fields(part, _PART_FIELDS, NEUTRAL_PART, path)
    where = join_path(path, "text")
    if "text" not in given:
        raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    text: str = given["text"]
    return text


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
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs_object(delta.tokens),
                "finish_reason": finished.reason.value,
                "stop_reason": finished.stop,
            }
            for delta, finished in choices
        ]
        return {**self._head, "object": "chat.completion", "choices": objects, "usage": usage_object(usage)}

    def opening(self, index: int) -> JsonObject:
        """The chunk with the role; sent together with the choice's first token."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with text."""
        if not delta.text and not (self._logprobs and delta.tokens):
            return None
        return self._chunk(delta.choice, {"content": delta.text}, logprobs=self._logprobs_object(delta.tokens))

    def ending(self, finished: ChoiceFinished) -> JsonObject:
        """The chunk with the finish reason."""
        chunk = self._chunk(finished.choice, {}, finish_reason=finished.reason.value)
        chunk["choices"][0]["stop_reason"] = finished.stop
        return chunk

    def usage(self, usage: Usage) -> JsonObject:
        """The chunk with the usage, which belongs to no choice."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_object(usage)}

    def _chunk(
        self, index: int, delta: JsonObject, *, logprobs: JsonObject | None = None, finish_reason: str | None = None
    ) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs_object(self, tokens: tuple[TokenPiece, ...]) -> JsonObject | None:
        if not self._logprobs:
            return None
        content = [
            {
                "token": token.text,
                "logprob": finite_logprob(token.logprob),
                "bytes": list(token.bytes),
                "top_logprobs": [],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}
