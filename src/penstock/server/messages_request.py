"""`POST /v1/messages` and `/v1/messages/count_tokens`: from Anthropic's bodies to an `Exchange`.

Decides how Anthropic's terms become the engine's: `system` is the first turn, text blocks of one turn are joined by
line breaks, `stop_sequences` are stop strings. Blocks other than text are refused by name in `_block`, the one place
where tool blocks will be read. Knows no HTTP and no answers.
"""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, Message
from penstock.server.exchange import Exchange
from penstock.server.fields import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    TEXT,
    Field,
    Kind,
    Neutrals,
    join_path,
    read_fields,
)
from penstock.server.parameters import check_model, check_prompt_chars, read_terms, sampling_fields
from penstock.server.strict_json import JsonObject, printable

__all__ = [
    "COUNT_FIELDS",
    "MESSAGES_FIELDS",
    "NEUTRAL_COUNT",
    "NEUTRAL_MESSAGES",
    "parse_count",
    "parse_messages",
]

_CACHE_CONTROL = {
    "type": "object",
    "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h", None]}},
    "required": ["type"],
    "additionalProperties": False,
}
_BLOCK = {
    "type": "object",
    "properties": {
        "type": {"const": "text"},
        "text": {"type": "string"},
        "cache_control": {"anyOf": [_CACHE_CONTROL, {"type": "null"}]},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK, "minItems": 1}]}
_TURN = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
ROLES = ("user", "assistant", "system")
SAMPLING = ("temperature", "top_k", "top_p")

TURNS = Kind(
    "a list of messages", {"type": "array", "items": _TURN, "minItems": 1}, lambda value: isinstance(value, list)
)
BLOCKS = Kind(
    "a string or a list of text blocks",
    _BLOCKS,
    lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value)),
)
STRINGS = Kind(
    "a list of strings",
    {"type": "array", "items": {"type": "string", "minLength": 1}},
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
CACHE_CONTROL = Kind("an object", _CACHE_CONTROL, lambda value: isinstance(value, dict))
METADATA = Kind(
    "an object",
    {"type": "object", "properties": {"user_id": {"type": ["string", "null"]}}, "additionalProperties": False},
    lambda value: isinstance(value, dict),
)

_CACHE_FIELD = Field(
    "cache_control", CACHE_CONTROL, "Honoured everywhere: every prompt is cached for as long as memory lasts."
)
_PROMPT_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("messages", TURNS, "The conversation; it ends with a user's turn."),
    Field("system", BLOCKS, "The system prompt."),
    _CACHE_FIELD,
)
MESSAGES_FIELDS = (
    *_PROMPT_FIELDS,
    Field("max_tokens", INTEGER, "Most tokens to generate."),
    Field("metadata", METADATA, "user_id: passed to the engine as the request's tenant. Not logged, not stored."),
    Field("stop_sequences", STRINGS, "Texts that end the answer."),
    Field("stream", BOOLEAN, "Answer in events."),
    *(field for field in sampling_fields() if field.name in SAMPLING),
)
COUNT_FIELDS = _PROMPT_FIELDS
_NEUTRAL_PROMPT: dict[str, tuple[Any, ...]] = {
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
    "user_profile_id": (),
    "workspace_id": (),
}
NEUTRAL_COUNT: Neutrals = _NEUTRAL_PROMPT
NEUTRAL_MESSAGES: Neutrals = _NEUTRAL_PROMPT | {
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
}
_NEUTRAL_BLOCK: Neutrals = {"citations": ([],)}

_TURN_FIELDS = (Field("role", TEXT, "Who speaks."), Field("content", BLOCKS, "What is said."))
_BLOCK_FIELDS = (Field("type", TEXT, "Always text."), Field("text", TEXT, "The text."), _CACHE_FIELD)
_CACHE_FIELDS = (Field("type", TEXT, "Always ephemeral."), Field("ttl", TEXT, "5m or 1h."))
_METADATA_FIELDS = (Field("user_id", TEXT, "On whose behalf."),)


def parse_messages(body: JsonObject, exchange_id: str, card: ModelCard, limits: RequestLimits) -> Exchange:
    """The exchange that a body of `/v1/messages` asks for.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, MESSAGES_FIELDS, NEUTRAL_MESSAGES)
    if "max_tokens" not in given:
        raise InvalidParameter("max_tokens", "max_tokens is missing.", code="missing_value")
    prompt = _prompt(given, card, limits)
    metadata = read_fields(given.get("metadata", {}), _METADATA_FIELDS, {}, "metadata")
    wanted = {name: given[name] for name in ("max_tokens", *SAMPLING) if name in given}
    wanted |= {"stop": given.get("stop_sequences") or None, "user": metadata.get("user_id", "")}
    aliases = {"stop": "stop_sequences", "user": "metadata.user_id"}
    terms = read_terms({name: value for name, value in wanted.items() if value is not None}, {}, aliases, card, limits)
    return Exchange(
        id=exchange_id,
        asks=(terms.ask(exchange_id, prompt),),
        stream=given.get("stream", False),
        aliases=aliases,
    )


def parse_count(body: JsonObject, card: ModelCard, limits: RequestLimits) -> ChatPrompt:
    """The conversation that a body of `/v1/messages/count_tokens` holds.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    return _prompt(read_fields(body, COUNT_FIELDS, NEUTRAL_COUNT), card, limits)


def _prompt(given: JsonObject, card: ModelCard, limits: RequestLimits) -> ChatPrompt:
    if not card.has_chat_template:
        message = "The served model has no chat template; use /v1/completions."
        raise InvalidParameter("messages", message, code="unsupported_model")
    _check_cache_control(given, "")
    turns = _turns(given.get("messages", []), limits)
    system = given.get("system")
    if system is not None:
        turns.insert(0, Message("system", _content(system, "system")))
    check_prompt_chars(sum(len(turn.content) for turn in turns), "messages", card, limits)
    return ChatPrompt(tuple(turns))


def _turns(values: list[Any], limits: RequestLimits) -> list[Message]:
    if not values:
        raise InvalidParameter("messages", "messages must hold at least one message.", code="missing_value")
    if len(values) > limits.max_messages:
        raise InvalidParameter("messages", f"messages may hold at most {limits.max_messages} messages.")
    turns = [_turn(value, f"messages.{index}") for index, value in enumerate(values)]
    if turns[-1].role == "assistant":
        where = f"messages.{len(turns) - 1}.role"
        message = f"{where}: continuing an assistant's turn is not supported; end with a user's."
        raise InvalidParameter(where, message, code="unsupported_value")
    return turns


def _turn(value: Any, path: str) -> Message:
    given = _required(value, _TURN_FIELDS, {}, path, "role", "content")
    role: str = given["role"]
    if role not in ROLES:
        where = join_path(path, "role")
        raise InvalidParameter(where, f"{where} must be one of {', '.join(ROLES)}.")
    return Message(role, _content(given["content"], join_path(path, "content")))


def _content(content: str | list[Any], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block(block, join_path(path, index)) for index, block in enumerate(content))


def _block(value: Any, path: str) -> str:
    """The text of one content block."""
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "text":
        where = join_path(path, "type")
        message = f"{where}: blocks of type {printable(value['type'])!r} are not supported; only text is."
        raise InvalidParameter(where, message, code="unsupported_value")
    given = _required(value, _BLOCK_FIELDS, _NEUTRAL_BLOCK, path, "type", "text")
    _check_cache_control(given, path)
    text: str = given["text"]
    return text


def _check_cache_control(given: JsonObject, path: str) -> None:
    if "cache_control" not in given:
        return
    where = join_path(path, "cache_control")
    control = _required(given["cache_control"], _CACHE_FIELDS, {}, where, "type")
    for name, allowed in (("type", ("ephemeral",)), ("ttl", ("5m", "1h"))):
        if control.get(name, allowed[0]) not in allowed:
            at = join_path(where, name)
            raise InvalidParameter(at, f"{at} must be one of {', '.join(allowed)}.")


def _required(value: Any, fields: tuple[Field, ...], neutrals: Neutrals, path: str, *names: str) -> JsonObject:
    """The fields of a nested object, some of which must be there."""
    if not OBJECT.accepts(value):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    given = read_fields(value, fields, neutrals, path)
    for name in names:
        if name not in given:
            where = join_path(path, name)
            raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    return given
