"""`POST /v1/responses`: from OpenAI's body to an `Exchange`, and what of the body the response repeats.

Decides how the conversation is put together: the instructions first, then what the previous response's conversation
was (without its instructions, as OpenAI has it), then the input. Items other than messages, and parts other than text,
are refused by name in `_item` and `_part`. Knows no HTTP and no answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, Message
from penstock.server.exchange import Exchange
from penstock.server.fields import (
    BOOLEAN,
    INTEGER,
    LABELS,
    TEXT,
    Field,
    Kind,
    Neutrals,
    join_path,
    read_fields,
)
from penstock.server.parameters import check_model, check_prompt_chars, read_terms, sampling_fields
from penstock.server.strict_json import JsonObject, printable

__all__ = ["NEUTRAL_RESPONSES", "RESPONSES_FIELDS", "ResponseRequest", "parse_response"]

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PART_TYPES = ("input_text", "output_text")
SAMPLING = ("temperature", "top_p")

_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(PART_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", None]},
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
    },
    "required": ["role", "content"],
}
INPUT = Kind(
    "a string or a list of message items",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]},
    lambda value: isinstance(value, str | list),
)
CONTENT = Kind(
    "a string or a list of text parts",
    {},
    lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value)),
)
RESPONSES_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("input", INPUT, "What is said: text, or message items."),
    Field("instructions", TEXT, "The system prompt of this response; not carried over to the next."),
    Field("previous_response_id", TEXT, "The response whose conversation this one continues."),
    Field("max_output_tokens", INTEGER, "Most tokens to generate; by default the rest of the model's context."),
    Field("stream", BOOLEAN, "Answer in events."),
    Field("background", BOOLEAN, "Answer at once and go on generating; needs store, and excludes stream."),
    Field("store", BOOLEAN, "Keep the response, in memory, for as long as there is room; the default."),
    Field("metadata", LABELS, "Labels of the caller's own, repeated in the response."),
    Field("user", TEXT, "On whose behalf: passed to the engine as the request's tenant. Not logged."),
    Field("safety_identifier", TEXT, "As user; user wins where both are given."),
    *(field for field in sampling_fields() if field.name in SAMPLING),
)
NEUTRAL_RESPONSES: Neutrals = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ITEM_FIELDS = (
    Field("type", TEXT, "Always message."),
    Field("role", TEXT, "Who speaks."),
    Field("content", CONTENT, "What is said."),
    Field("id", TEXT, "An item's own name, in items that come from a response."),
    Field("status", TEXT, "An item's state, in items that come from a response."),
)
_PART_FIELDS = (Field("type", TEXT, "input_text or output_text."), Field("text", TEXT, "The text."))
_NEUTRAL_ITEM: Neutrals = {"phase": ()}
_NEUTRAL_PART: Neutrals = {"annotations": ([],), "logprobs": ([],), "prompt_cache_breakpoint": ()}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request.

    Attributes:
        history: the conversation without the instructions.
        repeated: what the response object repeats of the request.
    """

    exchange: Exchange
    history: tuple[Message, ...]
    repeated: JsonObject
    background: bool
    store: bool


def parse_response(
    body: JsonObject,
    exchange_id: str,
    card: ModelCard,
    limits: RequestLimits,
    recall: Callable[[str], tuple[Message, ...]],
) -> ResponseRequest:
    """What `body` asks for.

    Args:
        body: the request's.
        exchange_id: the response's id.
        card: the served model.
        limits: on requests.
        recall: gives the conversation of an earlier response, by id.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, RESPONSES_FIELDS, NEUTRAL_RESPONSES)
    if not card.has_chat_template:
        raise InvalidParameter("input", "The served model has no chat template.", code="unsupported_model")
    background, store, stream = (
        given.get(name, default) for name, default in (("background", False), ("store", True), ("stream", False))
    )
    if background and (stream or not store):
        message = "background needs store, and does not go together with stream."
        raise InvalidParameter("background", message)
    wanted = {name: given[name] for name in (*SAMPLING, "user", "safety_identifier") if name in given}
    if "max_output_tokens" in given:
        wanted["max_tokens"] = given["max_output_tokens"]
    aliases = {"max_tokens": "max_output_tokens", "messages": "input"}
    terms = read_terms(wanted, {"max_tokens": None}, aliases, card, limits)
    history = _history(given, limits, recall)
    instructions = given.get("instructions")
    prompt = history if instructions is None else (Message("system", instructions), *history)
    check_prompt_chars(sum(len(turn.content) for turn in prompt), "input", card, limits)
    exchange = Exchange(exchange_id, (terms.ask(exchange_id, ChatPrompt(prompt)),), stream=stream, aliases=aliases)
    sampling = {name: getattr(terms.params, name) for name in SAMPLING}
    return ResponseRequest(exchange, history, _repeated(given) | sampling, background, store)


def _repeated(given: JsonObject) -> JsonObject:
    names = ("instructions", "max_output_tokens", "previous_response_id", "safety_identifier", "user")
    return {name: given.get(name) for name in names} | {"metadata": given.get("metadata", {})}


def _history(
    given: JsonObject, limits: RequestLimits, recall: Callable[[str], tuple[Message, ...]]
) -> tuple[Message, ...]:
    value = given.get("input")
    if value is None or value == []:
        raise InvalidParameter("input", "input is missing.", code="missing_value")
    before = recall(given["previous_response_id"]) if "previous_response_id" in given else ()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if len(before) + len(value) > limits.max_messages:
        raise InvalidParameter("input", f"A conversation may hold at most {limits.max_messages} messages.")
    return (*before, *(_item(item, f"input.{index}") for index, item in enumerate(value)))


def _item(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    _check_type(value.get("type", "message"), ("message",), path)
    given = read_fields(value, _ITEM_FIELDS, _NEUTRAL_ITEM, path)
    _require(given, path, "role", "content")
    if given["role"] not in ROLES:
        where = join_path(path, "role")
        raise InvalidParameter(where, f"{where} must be one of {', '.join(ROLES)}.")
    content = given["content"]
    where = join_path(path, "content")
    if not isinstance(content, str):
        content = "\n".join(_part(part, join_path(where, index)) for index, part in enumerate(content))
    return Message(ROLES[given["role"]], content)


def _part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    _check_type(value.get("type", "input_text"), PART_TYPES, path)
    given = read_fields(value, _PART_FIELDS, _NEUTRAL_PART, path)
    _require(given, path, "type", "text")
    text: str = given["text"]
    return text


def _check_type(kind: Any, known: tuple[str, ...], path: str) -> None:
    if isinstance(kind, str) and kind not in known:
        where = join_path(path, "type")
        message = f"{where}: {printable(kind)!r} is not supported; only {' and '.join(known)} is."
        raise InvalidParameter(where, message, code="unsupported_value")


def _require(given: JsonObject, path: str, *names: str) -> None:
    for name in names:
        if name not in given:
            where = join_path(path, name)
            raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
