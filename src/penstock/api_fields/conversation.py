"""`messages` of a request: OpenAI's message objects, read into the contract's `Message`.

Decides which fields a message of each role may have, and that each tool result must refer to an earlier call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api_fields.fields import (
    INTEGER,
    OBJECT,
    TEXT,
    Field,
    Kind,
    Neutrals,
    join_path,
    read_fields,
)
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.request import Message
from penstock.contract.tools import ToolCall

__all__ = ["MESSAGES", "MESSAGE_FIELDS", "ROLES", "read_arguments", "read_conversation"]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of the API -> roles that chat templates know."""

_ONLY_FOR = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_ARGUMENTS = {"type": "string", "pattern": r"^\s*(\{[\s\S]*\}\s*)?$"}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": _ARGUMENTS},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "type", "function"],
    "additionalProperties": False,
}
_OPTIONAL_TEXT = {"type": ["string", "null"]}
_NULL = {"type": "null"}
_TEXT_SCHEMA = {"type": "string"}
_CONTENT_SCHEMAS = [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_PART, "minItems": 1}]


def _message_schema(roles: Sequence[str], required: Sequence[str], **own: JsonObject) -> JsonObject:
    """The schema of a message of these roles; `own` holds the schemas specific to them. Null means absent."""
    shared: JsonObject = {
        "role": {"enum": list(roles)},
        "content": {"anyOf": _CONTENT_SCHEMAS},
        "name": _OPTIONAL_TEXT,
    }
    return {
        "type": "object",
        "properties": shared | dict.fromkeys(_ONLY_FOR, _NULL) | own,
        "required": ["role", *required],
        "additionalProperties": False,
    }


_THOUGHTS: JsonObject = {"reasoning_content": _OPTIONAL_TEXT, "reasoning": _OPTIONAL_TEXT}
_MESSAGE = {
    "anyOf": [
        _message_schema(["system", "developer", "user"], ["content"]),
        _message_schema(
            ["assistant"], ["content"], tool_calls={"type": ["array", "null"], "items": _CALL}, **_THOUGHTS
        ),
        _message_schema(
            ["assistant"],
            ["tool_calls"],
            content={"anyOf": [*_CONTENT_SCHEMAS, _NULL]},
            tool_calls={"type": "array", "items": _CALL, "minItems": 1},
            **_THOUGHTS,
        ),
        _message_schema(["tool"], ["content", "tool_call_id"], tool_call_id=_TEXT_SCHEMA),
    ]
}
NEUTRAL_MESSAGE: Neutrals = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "provider_specific_fields": ({}, {"refusal": None}),  # LiteLLM's copy of answer fields that it does not know
    "refusal": (),
}

NEUTRAL_PART: Neutrals = {"cache_control": (), "prompt_cache_breakpoint": ()}

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
_CALLS = Kind("a list of tool calls", {}, lambda value: isinstance(value, list))

MESSAGE_FIELDS = (
    Field("role", TEXT, "Who speaks."),
    Field("content", _CONTENT, "What is said; an assistant that calls tools may leave it out."),
    Field("name", TEXT, "The speaker's name, if the model's chat template has a place for names."),
    Field("tool_calls", _CALLS, "The calls that the assistant made."),
    Field("tool_call_id", TEXT, "The call whose result this is."),
    Field("reasoning_content", TEXT, "What the assistant thought; its chat template shows what it was trained to see."),
    Field("reasoning", TEXT, "Another name of reasoning_content."),
)
_CALL_FIELDS = (
    Field("id", TEXT, "The call's id."),
    Field("type", TEXT, "Always function."),
    Field("function", OBJECT, "What is called."),
    Field("index", INTEGER, "The position in a stream."),
)
_FUNCTION_FIELDS = (
    Field("name", TEXT, "The function's name."),
    Field("arguments", TEXT, "The JSON text of the arguments."),
)
_PART_FIELDS = (Field("type", TEXT, "Always text."), Field("text", TEXT, "The text."))


@dataclass(frozen=True, slots=True)
class _Context:
    """State for reading messages: the limits, and the function names of earlier calls by call id."""

    limits: RequestLimits
    made: dict[str, str]


def read_conversation(given: JsonObject, limits: RequestLimits) -> tuple[Message, ...]:
    """The messages of a request.

    Raises:
        InvalidParameter: a message is malformed, or answers a call that was never made; names the field.
    """
    values: list[Any] = given.get("messages", [])
    if not values:
        raise InvalidParameter("messages", "messages must hold at least one message.", code="missing_value")
    if len(values) > limits.max_messages:
        raise InvalidParameter("messages", f"messages may hold at most {limits.max_messages} messages.")
    context = _Context(limits, {})
    return tuple(_message(value, f"messages.{index}", context) for index, value in enumerate(values))


def _message(value: Any, path: str, context: _Context) -> Message:
    given = _object(value, MESSAGE_FIELDS, path)
    role = _role(_required(given, "role", path), join_path(path, "role"))
    _check_role(given, role, path)
    calls = tuple(
        _call(call, f"{path}.tool_calls.{index}", context)
        for index, call in enumerate(_bounded(given.get("tool_calls", []), path, context))
    )
    if not calls or "content" in given:
        content = _content(_required(given, "content", path), join_path(path, "content"))
    else:
        content = ""
    call_id, name = given.get("tool_call_id", ""), given.get("name", "")
    if len(name) > context.limits.max_name_chars:
        where = join_path(path, "name")
        raise InvalidParameter(where, f"{where} may have at most {context.limits.max_name_chars} characters.")
    if role == "tool":
        name = _answered(_required(given, "tool_call_id", path), name, path, context)
    return Message(role, content, calls, call_id, name, _reasoning(given, path))


def _role(role: str, path: str) -> str:
    if role == "function":
        message = f"{path}: messages of role 'function' are not supported; use tool_calls and the role 'tool'."
        raise InvalidParameter(path, message, code="unsupported_parameter")
    if role not in ROLES:
        raise InvalidParameter(path, f"{path} must be one of {', '.join(ROLES)}.")
    return ROLES[role]


def _check_role(given: JsonObject, role: str, path: str) -> None:
    for name, owner in _ONLY_FOR.items():
        if given.get(name) and role != owner:
            where = join_path(path, name)
            raise InvalidParameter(where, f"{where} belongs into messages of role {owner!r} only.")


def _reasoning(given: JsonObject, path: str) -> str:
    spellings = {given[name] for name in ("reasoning_content", "reasoning") if name in given}
    if len(spellings) > 1:
        where = join_path(path, "reasoning")
        raise InvalidParameter(where, f"{where} and reasoning_content contradict each other: give one of them.")
    return spellings.pop() if spellings else ""


def _answered(call_id: str, name: str, path: str, context: _Context) -> str:
    """The name of the function whose result a tool message holds."""
    if call_id not in context.made:
        where = join_path(path, "tool_call_id")
        raise InvalidParameter(where, f"{where}: no message before this one made a call with this id.")
    called = context.made[call_id]
    if name and name != called:
        where = join_path(path, "name")
        raise InvalidParameter(where, f"{where}: the call with this id is of another function.")
    return called


def _bounded(calls: Sequence[Any], path: str, context: _Context) -> Sequence[Any]:
    if len(calls) > context.limits.max_tool_calls:
        where = join_path(path, "tool_calls")
        raise InvalidParameter(where, f"{where} may hold at most {context.limits.max_tool_calls} calls.")
    return calls


def _call(value: Any, path: str, context: _Context) -> ToolCall:
    given = _object(value, _CALL_FIELDS, path)
    if _required(given, "type", path) != "function":
        where = join_path(path, "type")
        message = f"{where}: only calls of type 'function' are supported."
        raise InvalidParameter(where, message, code="unsupported_parameter")
    where = join_path(path, "function")
    function = _object(_required(given, "function", path), _FUNCTION_FIELDS, where)
    call_id, name = _required(given, "id", path), _required(function, "name", where)
    context.made[call_id] = name
    return ToolCall(
        call_id, name, read_arguments(_required(function, "arguments", where), join_path(where, "arguments"))
    )


def read_arguments(text: str, path: str) -> str:
    """The arguments' JSON text; an empty text, which some clients send for no arguments, becomes an empty object.

    Raises:
        InvalidParameter: the text is not a JSON object; names `path`.
    """
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be the JSON text of an object.")
    return text if text.strip() else "{}"


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
    text: str = _required(given, "text", path)
    return text


def _object(value: Any, fields: Sequence[Field], path: str) -> JsonObject:
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    return read_fields(value, fields, NEUTRAL_MESSAGE if fields is MESSAGE_FIELDS else {}, path)


def _required(given: JsonObject, name: str, path: str) -> Any:
    if name not in given:
        where = join_path(path, name)
        raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    return given[name]
