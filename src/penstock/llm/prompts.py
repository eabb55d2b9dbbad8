"""Converts the forms in which the library accepts prompts to the engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt

__all__ = ["Conversation", "PromptLike", "as_chat_prompt", "as_prompt", "as_prompts"]

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages in the form of OpenAI's chat completions: `role`, `content` and more."""


def as_prompts(given: PromptLike | Sequence[PromptLike]) -> list[Prompt]:
    """Convert one prompt or a list of them; always returns a list."""
    if isinstance(given, str | Mapping) or _is_token_ids(given):
        return [as_prompt(given)]  # type: ignore[arg-type]
    return [as_prompt(one) for one in given]  # type: ignore[arg-type]


def as_prompt(given: PromptLike) -> Prompt:
    """Convert one prompt.

    Raises:
        InvalidParameter: it has none of the accepted forms.
    """
    if isinstance(given, str):
        return TextPrompt(given)
    if isinstance(given, Mapping):
        return _from_mapping(given)
    if _is_token_ids(given):
        return TokenPrompt(tuple(given))
    raise InvalidParameter("prompt", f"must be text or a list of token ids, got {type(given).__name__}")


def as_chat_prompt(messages: Conversation) -> ChatPrompt:
    """Convert one conversation of plain turns.

    Raises:
        InvalidParameter: a message is not `{"role": text, "content": text}`.
    """
    turns = []
    for index, message in enumerate(messages):
        if set(message) != {"role", "content"}:
            raise InvalidParameter(f"messages.{index}", f"must have role and content only, got {sorted(message)}")
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise InvalidParameter(f"messages.{index}", "role and content must be text")
        turns.append(Message(message["role"], message["content"]))
    return ChatPrompt(tuple(turns))


def _from_mapping(given: Mapping[str, Any]) -> Prompt:
    if set(given) == {"prompt"}:
        return as_prompt(given["prompt"])
    if set(given) == {"prompt_token_ids"}:
        return as_prompt(given["prompt_token_ids"])
    raise InvalidParameter("prompt", f"a mapping must have prompt or prompt_token_ids only, got {sorted(given)}")


def _is_token_ids(given: object) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | bytes)
        and len(given) > 0
        and all(isinstance(item, int) and not isinstance(item, bool) for item in given)
    )
