"""A conversation as the plain values that chat templates read, with a way to map every text in it.

Uses the keys and shapes that published templates expect, as transformers' `apply_chat_template` does:
`tool_calls` in OpenAI's form but with arguments as objects, `reasoning_content`, and optional keys only if they have a
value. Does not know Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import Message
from penstock.contract.tools import Tool, ToolCall

__all__ = ["as_definitions", "as_turns", "check_calls", "strings_in", "with_strings"]


def as_turns(messages: Sequence[Message], *, null_content: bool, thinking: bool = False) -> list[dict[str, Any]]:
    """The messages as templates read them.

    Args:
        messages: the messages in order, checked by `check_calls`.
        null_content: whether a turn with calls and no text has None as its content, rather than an empty string.
        thinking: whether the template calls reasoning `thinking` (gpt-oss). Such templates show only one text before a
            call, so the turn's content is appended to its reasoning.
    """
    turns = [_turn(message, null_content) for message in messages]
    return [_with_thinking(turn) for turn in turns] if thinking else turns


def check_calls(message: Message, path: str) -> None:
    """Refuse a message whose calls cannot be rendered.

    Raises:
        InvalidParameter: a call's arguments are not the JSON text of an object; names them below `path`.
    """
    for index, call in enumerate(message.tool_calls):
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            where = f"{path}.tool_calls.{index}.function.arguments"
            raise InvalidParameter(where, f"{where} must be the JSON text of an object.")


def as_definitions(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """The tools as templates read them; None if there are none, because templates test for it."""
    return [json.loads(tool.definition) for tool in tools] or None


def _turn(message: Message, null_content: bool) -> dict[str, Any]:
    absent = null_content and message.tool_calls and not message.content
    turn: dict[str, Any] = {"role": message.role, "content": None if absent else message.content}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    more = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    return turn | {key: value for key, value in more.items() if value}


def _with_thinking(turn: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" not in turn:
        return turn
    thought = {"thinking": turn.pop("reasoning_content")}
    if "tool_calls" in turn and turn["content"]:
        thought = {"thinking": f"{thought['thinking']}\n\n{turn['content']}", "content": ""}
    return turn | thought


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


_WORD = re.compile(r"[a-z_]{1,32}")
_KEYS = frozenset(
    {
        "arguments",
        "content",
        "description",
        "function",
        "id",
        "name",
        "parameters",
        "properties",
        "reasoning_content",
        "required",
        "role",
        "thinking",
        "tool_call_id",
        "tool_calls",
        "type",
    }
)


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, in a fixed order, except the keys and words of the format."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, member in value.items():
            if key not in _KEYS:
                yield key
            if not _is_format_word(key, member):
                yield from strings_in(member)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def with_strings(value: Any, strings: Iterator[str]) -> Any:
    """The same JSON value with its strings replaced, in the order of `strings_in`."""
    if isinstance(value, str):
        return next(strings)
    if isinstance(value, dict):
        exchanged = {}
        for key, member in value.items():
            new_key = key if key in _KEYS else next(strings)
            exchanged[new_key] = member if _is_format_word(key, member) else with_strings(member, strings)
        return exchanged
    if isinstance(value, list):
        return [with_strings(item, strings) for item in value]
    return value


def _is_format_word(key: str, member: Any) -> bool:
    return key in ("role", "type") and isinstance(member, str) and _WORD.fullmatch(member) is not None
