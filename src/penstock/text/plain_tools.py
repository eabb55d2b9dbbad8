"""Describes tools in ordinary messages, for models whose chat template has no place for them.

Decides the wording that offers tools, and how calls and results of earlier turns are written: in the format `json` of
`call_format`. Does not know templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from penstock.contract.request import Message
from penstock.contract.tools import Tool

__all__ = ["with_calls_in_words", "with_tools_in_words"]

_BEFORE = "You can call functions. These are described here as JSON, with a JSON Schema of their parameters:"
_AFTER = (
    'To call one, answer with a JSON object and nothing else: {"name": "<its name>", "arguments": {<its arguments>}}.'
    " To call several, answer with a list of such objects. When no function helps, answer in words."
)


def with_tools_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
    """The conversation with the tools described in its system message."""
    described = "\n".join(json.dumps(json.loads(tool.definition)["function"], ensure_ascii=False) for tool in tools)
    offer = f"{_BEFORE}\n\n{described}\n\n{_AFTER}"
    if messages and messages[0].role == "system":
        return (replace(messages[0], content=f"{messages[0].content}\n\n{offer}"), *messages[1:])
    return (Message("system", offer), *messages)


def with_calls_in_words(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with calls as assistant text, and the results that follow as one user message."""
    turns: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message.role == "tool"
        turn = _result(message) if is_result else _spelled(message)
        if is_result and after_result:
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n{turn.content}")
        else:
            turns.append(turn)
        after_result = is_result
    return tuple(turns)


def _result(message: Message) -> Message:
    source = f" of {message.name}" if message.name else ""
    return Message("user", f"Result{source}: {message.content}")


def _spelled(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls]
    written = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
    return replace(message, content=f"{message.content}\n{written}" if message.content else written, tool_calls=())
