"""What the library's `chat` asks beside sampling: OpenAI's messages, tools and template options, as terms of an ask.

Decides nothing that the server decides: whatever is more than plain turns is read by the very code that reads HTTP
requests, so it means, and is refused, the same. That code is loaded on first need: the HTTP stack comes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, EngineRequest, Prompt
from penstock.contract.tools import ReasoningUse, ReplyRules
from penstock.llm.prompts import Conversation, as_chat_prompt

__all__ = ["ChatOptions", "ChatRequest", "applied", "prompt_of", "read_chat", "read_chats"]


class ChatRequest(Protocol):
    """A conversation to be answered, and on what terms."""

    @property
    def prompt(self) -> ChatPrompt:
        """The conversation."""
        ...

    def applied(self, ask: EngineRequest) -> EngineRequest:
        """`ask` on these terms."""
        ...


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """OpenAI's fields of these names; None leaves a field out. See docs/tools.md."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    def fields(self) -> dict[str, Any]:
        """Those that were given."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: _plain(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _PlainChat:
    """Turns of plain text: reasoning is told apart, there is nothing to call."""

    prompt: ChatPrompt

    def applied(self, ask: EngineRequest) -> EngineRequest:
        return replace(ask, prompt=self.prompt, reply=ReplyRules(ReasoningUse.SPLIT))


def read_chats(
    given: Conversation | Sequence[Conversation], options: ChatOptions, card: ModelCard
) -> list[ChatRequest]:
    """One conversation or a list of them, always as a list; as `read_chat`."""
    if given and isinstance(given[0], Mapping):
        return [read_chat(given, options, card)]  # type: ignore[arg-type]
    return [read_chat(one, options, card) for one in given]  # type: ignore[arg-type]


def read_chat(messages: Conversation, options: ChatOptions, card: ModelCard) -> ChatRequest:
    """One conversation.

    Raises:
        InvalidParameter: a message or an option is malformed, or more than this model can do; names the field.
    """
    fields = options.fields()
    if not fields and all(map(_is_plain, messages)):
        return _PlainChat(as_chat_prompt(messages))
    from penstock.server.chat_terms import ANSWER_FIELDS, PROMPT_FIELDS, read_chat_terms
    from penstock.server.conversation import MESSAGES
    from penstock.server.fields import Field, read_fields

    known = (Field("messages", MESSAGES, ""), *PROMPT_FIELDS, *ANSWER_FIELDS)
    given = read_fields({"messages": _plain(messages)} | fields, known, {})
    return read_chat_terms(given, card, DEFAULT_LIMITS)


def prompt_of(given: Prompt | ChatRequest) -> Prompt:
    """What the model is given."""
    return given if isinstance(given, Prompt) else given.prompt


def applied(given: Prompt | ChatRequest, ask: EngineRequest) -> EngineRequest:
    """`ask` on the terms of a conversation, if it is one."""
    return ask if isinstance(given, Prompt) else given.applied(ask)


def _is_plain(message: Mapping[str, Any]) -> bool:
    return set(message) == {"role", "content"} and isinstance(message["content"], str)


def _plain(value: Any) -> Any:
    """The value as JSON has it: any mapping is an object, any other sequence a list."""
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(member) for member in value]
    return value
