"""The arguments of `chat` besides sampling: OpenAI's messages, tools and template options.

Anything beyond plain turns is read by `api_fields`, which also reads HTTP requests, so it means the same and is refused
for the same reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.api_fields.chat_options import ANSWER_FIELDS, PROMPT_FIELDS, read_chat_options
from penstock.api_fields.conversation import MESSAGES
from penstock.api_fields.fields import Field, read_fields
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, EngineRequest, Prompt
from penstock.contract.tools import ReasoningUse, ReplyRules
from penstock.llm.prompts import Conversation, as_chat_prompt

__all__ = ["ChatArguments", "ChatRequest", "applied", "prompt_of", "read_chat", "read_chats"]


class ChatRequest(Protocol):
    """A conversation, and how to answer it."""

    @property
    def prompt(self) -> ChatPrompt:
        """The conversation."""
        ...

    def applied(self, request: EngineRequest) -> EngineRequest:
        """`request` with this conversation and its rules for the answer."""
        ...


@dataclass(frozen=True, slots=True)
class ChatArguments:
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
        """The fields that were given."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: _plain(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _PlainChat:
    """Turns of plain text, without tools; reasoning is split from the answer."""

    prompt: ChatPrompt

    def applied(self, request: EngineRequest) -> EngineRequest:
        return replace(request, prompt=self.prompt, reply=ReplyRules(ReasoningUse.SPLIT))


def read_chats(
    given: Conversation | Sequence[Conversation], options: ChatArguments, card: ModelCard
) -> list[ChatRequest]:
    """Read one conversation or a list of them, each like `read_chat`; always returns a list."""
    if given and isinstance(given[0], Mapping):
        return [read_chat(given, options, card)]  # type: ignore[arg-type]
    return [read_chat(one, options, card) for one in given]  # type: ignore[arg-type]


def read_chat(messages: Conversation, options: ChatArguments, card: ModelCard) -> ChatRequest:
    """Read one conversation.

    Raises:
        InvalidParameter: a message or an option is malformed, or asks for more than this model can do; names the field.
    """
    fields = options.fields()
    if not fields and all(map(_is_plain, messages)):
        return _PlainChat(as_chat_prompt(messages))
    known = (Field("messages", MESSAGES, ""), *PROMPT_FIELDS, *ANSWER_FIELDS)
    given = read_fields({"messages": _plain(messages)} | fields, known, {})
    return read_chat_options(given, card, DEFAULT_LIMITS)


def prompt_of(given: Prompt | ChatRequest) -> Prompt:
    """The prompt that the model is given."""
    return given if isinstance(given, Prompt) else given.prompt


def applied(given: Prompt | ChatRequest, request: EngineRequest) -> EngineRequest:
    """`request` with the conversation and its rules if `given` is a chat, else unchanged."""
    return request if isinstance(given, Prompt) else given.applied(request)


def _is_plain(message: Mapping[str, Any]) -> bool:
    return set(message) == {"role", "content"} and isinstance(message["content"], str)


def _plain(value: Any) -> Any:
    """The value as plain JSON: any mapping becomes a dict, any other sequence a list."""
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(member) for member in value]
    return value
