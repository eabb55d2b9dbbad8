"""Parse the input items of `/v1/responses` into the contract's messages.

Consecutive reasoning, text and calls of the assistant become one turn, as they were generated. Items and parts of other
types are rejected; the error names the type.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.api_fields.conversation import read_arguments
from penstock.api_fields.fields import TEXT, Field, Kind, Neutrals, join_path, read_object
from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.request import Message
from penstock.contract.tools import ToolCall

__all__ = ["INPUT", "read_items"]

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PART_TYPES = ("input_text", "output_text")

_STRING = {"type": "string"}
_OPTIONAL = {"type": ["string", "null"]}


def _part_schema(*kinds: str) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, "text": _STRING},
        "required": ["type", "text"],
    }


def _item_schema(kind: str, **required: Any) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "id": _OPTIONAL, "status": _OPTIONAL} | required,
        "required": ["type", *required],
    }


_TEXT_OR_PARTS = {"anyOf": [_STRING, {"type": "array", "items": _part_schema(*PART_TYPES), "minItems": 1}]}
_MESSAGE = {
    "type": "object",
    "properties": {"type": {"enum": ["message", None]}, "role": {"enum": list(ROLES)}, "content": _TEXT_OR_PARTS},
    "required": ["role", "content"],
}
_ITEMS = [
    _MESSAGE,
    _item_schema("function_call", call_id=_STRING, name=_STRING, arguments=_STRING),
    _item_schema("function_call_output", call_id=_STRING, output=_TEXT_OR_PARTS),
    _item_schema("compaction", encrypted_content=_STRING),
    _item_schema("reasoning", content={"type": "array", "items": _part_schema("reasoning_text")}),
]
INPUT = Kind(
    "a string or a list of items",
    {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _ITEMS}, "minItems": 1}]},
    lambda value: isinstance(value, str | list),
)
CONTENT = Kind(
    "a string or a list of text parts",
    {},
    lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value)),
)
PARTS = Kind("a list of parts", {}, lambda value: isinstance(value, list))

_COMMON = (
    Field("type", TEXT, "What kind of item it is."),
    Field("id", TEXT, "An item's own name, in items that come from a response."),
    Field("status", TEXT, "An item's state, in items that come from a response."),
)
_CALL_ID = Field("call_id", TEXT, "Which call it is.")
_FIELDS = {
    "message": (*_COMMON, Field("role", TEXT, "Who speaks."), Field("content", CONTENT, "What is said.")),
    "function_call": (
        *_COMMON,
        _CALL_ID,
        Field("name", TEXT, "The function's name."),
        Field("arguments", TEXT, "The JSON text of the arguments."),
    ),
    "function_call_output": (*_COMMON, _CALL_ID, Field("output", CONTENT, "What came of the call.")),
    "compaction": (*_COMMON, Field("encrypted_content", TEXT, "The summary, as /v1/responses/compact returned it.")),
    "reasoning": (*_COMMON, Field("content", PARTS, "What the model thought.")),
}
_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"),
    "compaction": ("type", "encrypted_content"),
    "reasoning": ("type",),
}
_DIRECT: dict[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "namespace": ()}
_NEUTRALS: dict[str, Neutrals] = {
    "message": {"phase": ()},
    "function_call": _DIRECT | {"async": (False,)},
    "function_call_output": _DIRECT | {"name": ()},
    "compaction": {"created_by": ()},
    "reasoning": {"summary": ([],), "encrypted_content": ()},
}
_PART_FIELDS = (
    Field("type", TEXT, "What kind of part it is."),
    Field("text", TEXT, "The text."),
    Field("logprobs", PARTS, "Those of an earlier answer, in parts that come from one; no model is shown them."),
)
_NEUTRAL_PART: Neutrals = {"annotations": ([],), "prompt_cache_breakpoint": ()}


def read_items(values: list[Any], before: tuple[Message, ...], limits: RequestLimits) -> tuple[Message, ...]:
    """Append items to the conversation `before`.

    Raises:
        InvalidParameter: an item is malformed, answers an unknown call, or there are too many; names the field.
    """
    if len(before) + len(values) > limits.max_messages:
        raise InvalidParameter("input", f"A conversation may hold at most {limits.max_messages} messages.")
    made = {call.id: call.name for message in before for call in message.tool_calls}
    turns = _joined(_item(value, f"input.{index}", made) for index, value in enumerate(values))
    if any(len(turn.tool_calls) > limits.max_tool_calls for turn in turns):
        raise InvalidParameter("input", f"input: a turn may hold at most {limits.max_tool_calls} calls.")
    return (*before, *turns)


def _joined(turns: Iterable[Message]) -> list[Message]:
    """Join the messages that belong to the same assistant turn."""
    joined: list[Message] = []
    for turn in turns:
        if joined and _goes_on(joined[-1], turn):
            joined[-1] = _both(joined[-1], turn)
        else:
            joined.append(turn)
    return joined


def _goes_on(turn: Message, later: Message) -> bool:
    """Whether `later` continues the same assistant turn: reasoning comes first, then text and calls."""
    if turn.role != "assistant" or later.role != "assistant":
        return False
    if turn.tool_calls and later.content:  # text after calls that are still unanswered
        return True
    return bool(later.tool_calls) or not (turn.tool_calls or turn.content)


def _both(turn: Message, later: Message) -> Message:
    thoughts = "\n".join(each for each in (turn.reasoning, later.reasoning) if each)
    calls = turn.tool_calls + later.tool_calls
    return replace(turn, content=turn.content + later.content, tool_calls=calls, reasoning=thoughts)


def _item(value: Any, path: str, made: dict[str, str]) -> Message:
    kind = _kind(value, tuple(_FIELDS), path) or "message"
    given = read_object(value, _FIELDS[kind], path, *_REQUIRED[kind], neutrals=_NEUTRALS[kind])
    match kind:
        case "function_call":
            arguments = read_arguments(given["arguments"], join_path(path, "arguments"))
            made[given["call_id"]] = given["name"]
            return Message("assistant", "", (ToolCall(given["call_id"], given["name"], arguments),))
        case "function_call_output":
            return _result(given, path, made)
        case "compaction":
            return Message("user", _summary(given["encrypted_content"], join_path(path, "encrypted_content")))
        case "reasoning":
            parts = _texts(given.get("content", []), join_path(path, "content"), ("reasoning_text",))
            return Message("assistant", "", reasoning=parts)
    if given["role"] not in ROLES:
        where = join_path(path, "role")
        raise InvalidParameter(where, f"{where} must be one of {', '.join(ROLES)}.")
    return Message(ROLES[given["role"]], _texts(given["content"], join_path(path, "content"), PART_TYPES))


def _summary(encoded: str, path: str) -> str:
    """Decode a compacted conversation into the text that stands for it."""
    try:
        text = base64.b64decode(encoded, validate=True).decode("utf-8")
    except ValueError:
        raise InvalidParameter(path, f"{path} is not from this server's /v1/responses/compact.") from None
    return f"Summary of the conversation before:\n{text}"


def _result(given: JsonObject, path: str, made: dict[str, str]) -> Message:
    call_id: str = given["call_id"]
    if call_id not in made:
        where = join_path(path, "call_id")
        raise InvalidParameter(where, f"{where}: no item before this one made a call with this id.")
    text = _texts(given["output"], join_path(path, "output"), PART_TYPES)
    return Message("tool", text, tool_call_id=call_id, name=made[call_id])


def _texts(content: str | list[Any], path: str, kinds: tuple[str, ...]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, join_path(path, index), kinds) for index, part in enumerate(content))


def _part(value: Any, path: str, kinds: tuple[str, ...]) -> str:
    _kind(value, kinds, path)
    text: str = read_object(value, _PART_FIELDS, path, "type", "text", neutrals=_NEUTRAL_PART)["text"]
    return text


def _kind(value: Any, known: tuple[str, ...], path: str) -> str:
    """The type that an item or part names; "" if it names none."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return ""
    if kind not in known:
        where = join_path(path, "type")
        message = f"{where}: {printable(kind)!r} is not supported; only {' and '.join(known)} is."
        raise InvalidParameter(where, message, code="unsupported_value")
    return kind
