"""Parse Anthropic's conversations block by block into the contract's messages.

Adjacent texts are joined by line breaks. An assistant's reasoning, text and calls are one turn; each tool result is a
turn of its own, in the given order. Other blocks (images, documents, encrypted reasoning) are rejected; the error names
the type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api_fields.fields import BOOLEAN, OBJECT, TEXT, Field, Kind, Neutrals, join_path, read_object
from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.request import Message
from penstock.contract.tools import ToolCall

__all__ = ["BLOCKS", "CACHE_FIELD", "CACHE_SCHEMA", "TURNS", "check_cache_control", "read_text", "read_turns"]

CACHE_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h", None]}},
    "required": ["type"],
    "additionalProperties": False,
}


def _block_schema(kind: str, required: dict[str, Any], optional: dict[str, Any], *, cached: bool = True) -> JsonObject:
    cache = {"cache_control": {"anyOf": [CACHE_SCHEMA, {"type": "null"}]}} if cached else {}
    return {
        "type": "object",
        "properties": {"type": {"const": kind}} | required | optional | cache,
        "required": ["type", *required],
        "additionalProperties": False,
    }


_STRING = {"type": "string"}
_TEXT_BLOCK = _block_schema("text", {"text": _STRING}, {})
_TEXT_OR_BLOCKS = {"anyOf": [_STRING, {"type": "array", "items": _TEXT_BLOCK, "minItems": 1}]}
_BLOCK_SCHEMAS = {
    "text": _TEXT_BLOCK,
    "tool_use": _block_schema("tool_use", {"id": _STRING, "name": _STRING, "input": {"type": "object"}}, {}),
    "tool_result": _block_schema(
        "tool_result", {"tool_use_id": _STRING}, {"content": _TEXT_OR_BLOCKS, "is_error": {"type": "boolean"}}
    ),
    "thinking": _block_schema("thinking", {"thinking": _STRING, "signature": _STRING}, {}, cached=False),
}
_ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
"""The types of blocks that each role may use."""


def _turn_schema(role: str, kinds: Sequence[str]) -> JsonObject:
    blocks = {"type": "array", "items": {"anyOf": [_BLOCK_SCHEMAS[kind] for kind in kinds]}, "minItems": 1}
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": {"anyOf": [_STRING, blocks]}},
        "required": ["role", "content"],
        "additionalProperties": False,
    }


_TURN_SCHEMA = {"anyOf": [_turn_schema(role, kinds) for role, kinds in _ROLES.items()]}

TURNS = Kind(
    "a list of messages", {"type": "array", "items": _TURN_SCHEMA, "minItems": 1}, lambda value: isinstance(value, list)
)
BLOCKS = Kind(
    "a string or a list of blocks",
    _TEXT_OR_BLOCKS,
    lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value)),
)
RESULT = Kind("a string or a list of text blocks", _TEXT_OR_BLOCKS, lambda value: isinstance(value, str | list))
CACHE_FIELD = Field(
    "cache_control",
    Kind("an object", CACHE_SCHEMA, lambda value: isinstance(value, dict)),
    "Honoured everywhere: every prompt is cached for as long as memory lasts.",
)

_TYPE = Field("type", TEXT, "What kind of block it is.")
_BLOCK_FIELDS = {
    "text": (_TYPE, Field("text", TEXT, "The text."), CACHE_FIELD),
    "tool_use": (
        _TYPE,
        Field("id", TEXT, "The call's id."),
        Field("name", TEXT, "The tool that was called."),
        Field("input", OBJECT, "The arguments."),
        CACHE_FIELD,
    ),
    "tool_result": (
        _TYPE,
        Field("tool_use_id", TEXT, "The call whose result this is."),
        Field("content", RESULT, "What came of it; nothing by default."),
        Field("is_error", BOOLEAN, "The call failed: the model sees that in front of the result."),
        CACHE_FIELD,
    ),
    "thinking": (
        _TYPE,
        Field("thinking", TEXT, "What the assistant thought; its chat template shows what it was trained to see."),
        Field("signature", TEXT, "Empty in blocks of this server's; not checked."),
    ),
}
_REQUIRED = {
    "text": ("type", "text"),
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id"),
    "thinking": ("type", "thinking"),
}
_NEUTRALS: dict[str, Neutrals] = {
    "text": {"citations": ([],)},
    "tool_use": {"caller": ({"type": "direct"},), "toolset_name": ()},
    "tool_result": {"toolset_name": ()},
}
_TURN_FIELDS = (Field("role", TEXT, "Who speaks."), Field("content", BLOCKS, "What is said."))
_CACHE_FIELDS = (Field("type", TEXT, "Always ephemeral."), Field("ttl", TEXT, "5m or 1h."))


@dataclass(frozen=True, slots=True)
class _Thought:
    text: str


_Block = str | ToolCall | _Thought | Message
"""Text, a call, reasoning, or a tool result (a `Message`, because it is a turn of its own)."""


def read_turns(values: list[Any], limits: RequestLimits) -> list[Message]:
    """Parse `messages` into turns.

    Raises:
        InvalidParameter: a message is malformed, answers an unknown call, or there are too many; names the field.
    """
    if not values:
        raise InvalidParameter("messages", "messages must hold at least one message.", code="missing_value")
    made: dict[str, str] = {}
    turns: list[Message] = []
    for index, value in enumerate(values):
        turns += _turns(value, f"messages.{index}", made)
        if len(turns) > limits.max_messages:
            message = f"messages may hold at most {limits.max_messages} messages, results of tools included."
            raise InvalidParameter("messages", message)
        if len(turns[-1].tool_calls) > limits.max_tool_calls:
            where = f"messages.{index}.content"
            raise InvalidParameter(where, f"{where} may hold at most {limits.max_tool_calls} calls.")
    return turns


def read_text(content: str | list[Any], path: str) -> str:
    """The text of a string, or of text blocks joined by line breaks.

    Raises:
        InvalidParameter: a block is malformed, or of another kind; names the field.
    """
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, join_path(path, index)) for index, block in enumerate(content))


def check_cache_control(given: JsonObject, path: str) -> None:
    """Check that a `cache_control` is well formed. It has no other effect: every prompt is cached.

    Raises:
        InvalidParameter: it is malformed; names the field.
    """
    if "cache_control" not in given:
        return
    where = join_path(path, "cache_control")
    control = read_object(given["cache_control"], _CACHE_FIELDS, where, "type")
    for name, allowed in (("type", ("ephemeral",)), ("ttl", ("5m", "1h"))):
        if control.get(name, allowed[0]) not in allowed:
            at = join_path(where, name)
            raise InvalidParameter(at, f"{at} must be one of {', '.join(allowed)}.")


def _turns(value: Any, path: str, made: dict[str, str]) -> list[Message]:
    given = read_object(value, _TURN_FIELDS, path, "role", "content")
    role: str = given["role"]
    if role not in _ROLES:
        where = join_path(path, "role")
        raise InvalidParameter(where, f"{where} must be one of {', '.join(_ROLES)}.")
    content = given["content"]
    if isinstance(content, str):
        return [Message(role, content)]
    where = join_path(path, "content")
    blocks = [_block(block, join_path(where, index), role, made) for index, block in enumerate(content)]
    return [_assistant(blocks)] if role == "assistant" else list(_said(role, blocks))


def _assistant(blocks: list[_Block]) -> Message:
    texts = "\n".join(block for block in blocks if isinstance(block, str))
    calls = tuple(block for block in blocks if isinstance(block, ToolCall))
    thoughts = "\n".join(block.text for block in blocks if isinstance(block, _Thought))
    return Message("assistant", texts, calls, reasoning=thoughts)


def _said(role: str, blocks: list[_Block]) -> Iterator[Message]:
    """One turn for each run of texts, and one for each tool result."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, Message):
            if texts:
                yield Message(role, "\n".join(texts))
            texts = []
            yield block
    if texts:
        yield Message(role, "\n".join(texts))


def _block(value: Any, path: str, role: str, made: dict[str, str]) -> _Block:
    kind, given = _read_block(value, path, _ROLES[role])
    match kind:
        case "tool_use":
            made[given["id"]] = given["name"]
            return ToolCall(given["id"], given["name"], json.dumps(given["input"], ensure_ascii=False))
        case "tool_result":
            return _result(given, path, made)
        case "thinking":
            return _Thought(given["thinking"])
    text: str = given["text"]
    return text


def _result(given: JsonObject, path: str, made: dict[str, str]) -> Message:
    call_id: str = given["tool_use_id"]
    if call_id not in made:
        where = join_path(path, "tool_use_id")
        raise InvalidParameter(where, f"{where}: no message before this one made a call with this id.")
    text = read_text(given.get("content", ""), join_path(path, "content"))
    if given.get("is_error", False):
        text = f"Error: {text}" if text else "Error"
    return Message("tool", text, tool_call_id=call_id, name=made[call_id])


def _text(value: Any, path: str) -> str:
    _, given = _read_block(value, path, ("text",))
    text: str = given["text"]
    return text


def _read_block(value: Any, path: str, allowed: tuple[str, ...]) -> tuple[str, JsonObject]:
    """The block's type and its fields."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in allowed:
        where = join_path(path, "type")
        message = f"{where}: blocks of type {printable(kind)!r} are not supported here; {' and '.join(allowed)} are."
        raise InvalidParameter(where, message, code="unsupported_value")
    kind = kind if isinstance(kind, str) else "text"
    given = read_object(value, _BLOCK_FIELDS[kind], path, *_REQUIRED[kind], neutrals=_NEUTRALS.get(kind))
    check_cache_control(given, path)
    return kind, given
