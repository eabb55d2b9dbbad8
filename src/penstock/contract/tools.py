"""Functions that a model may call, the calls that it makes, and how an answer is parsed.

Schemas and arguments are carried as JSON text: immutable, and exactly as their author wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from penstock.contract.grammar import Grammar

__all__ = ["PLAIN_REPLY", "CallPiece", "ReasoningUse", "ReplyRules", "Tool", "ToolCall", "ToolUse", "made_calls"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller offers.

    Attributes:
        name: how the model calls it; unique among the tools of a request.
        definition: JSON object as chat templates expect it: `{"type": "function", "function": {"name", ...}}`.
        parameters: JSON Schema of the arguments, as JSON text.
        strict: whether only arguments that fit the schema make a call.
    """

    name: str
    definition: str
    parameters: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a conversation's history; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call that the model is making.

    Attributes:
        index: number of the call in its choice, from 0.
        id: given by the first piece of a call only; "" in the others.
        name: likewise.
        arguments: more of the arguments' JSON text; joined over a call's pieces, all of it.
        text_before: in a call's first piece: how many characters of the choice's text come before the call.
        tokens_before: in a call's first piece: how many of the choice's tokens had left the engine when it was found.
    """

    index: int
    id: str
    name: str
    arguments: str
    text_before: int = 0
    tokens_before: int = 0


def made_calls(pieces: Iterable[CallPiece]) -> tuple[ToolCall, ...]:
    """Join pieces into calls, in order; a call with missing pieces is shorter."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        known = calls.get(piece.index, ToolCall(piece.id, piece.name, ""))
        calls[piece.index] = ToolCall(known.id, known.name, known.arguments + piece.arguments)
    return tuple(calls[index] for index in sorted(calls))


class ToolUse(StrEnum):
    """Whether the model may, must or must not call; see OpenAI's `tool_choice`."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"
    """The answer is the arguments of the one tool that the rules name."""


class ReasoningUse(StrEnum):
    """What becomes of the reasoning that a model writes before its answer."""

    INLINE = "inline"
    """It stays in the text, tags and all."""
    SPLIT = "split"
    """Parsed, and returned beside the text."""
    HIDDEN = "hidden"
    """Parsed, and left out."""


@dataclass(frozen=True, slots=True)
class ReplyRules:
    """How an answer is parsed; by default it is not.

    Attributes:
        tool_name: the tool to call under `NAMED`; else "".
        parallel_tool_calls: whether one answer may hold several calls; if not, it ends after the first.
        form: the form of an answer under `AUTO` that calls nothing; the request's grammar then allows this form, and
            calls in plain JSON. None if such an answer is free text.
    """

    reasoning: ReasoningUse = ReasoningUse.INLINE
    tool_use: ToolUse = ToolUse.NONE
    tool_name: str = ""
    parallel_tool_calls: bool = True
    form: Grammar | None = None


PLAIN_REPLY = ReplyRules()
