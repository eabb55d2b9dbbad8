"""A conversation and its settings: turns, system prompt, sampling parameters, and the file that holds them.

Does not know terminals or engines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.chat_partner import Piece
from penstock.contract.errors import ConfigError, InvalidParameter, RequestError
from penstock.contract.request import Message
from penstock.sampling import PARAMETERS, Parameter, SamplingParams

__all__ = ["NOT_IN_CHAT", "SETTABLE", "Conversation", "Reply", "ReplyMeter"]

NOT_IN_CHAT = frozenset({"best_of", "logprobs", "logprobs_mode", "n", "prompt_logprobs"})
"""Parameters without effect in a conversation, which shows one answer and no numbers."""

SETTABLE: dict[str, Parameter] = {each.name: each for each in PARAMETERS if each.name not in NOT_IN_CHAT}
"""The parameters that `/set` takes, by name."""

DEFAULT = "default"
"""The VALUE that resets a parameter."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The figures of an answer.

    Attributes:
        tokens: tokens of the answer; a lower bound if the partner did not count them.
        first: seconds until the first piece; None if none came.
        rate: tokens per second from then on; 0 if there are too few to tell, or the partner did not count them.
        counted: whether the partner counted the tokens.
    """

    prompt_tokens: int
    tokens: int
    first: float | None
    rate: float
    stopped: bool = False
    counted: bool = True

    @property
    def used(self) -> int:
        """Tokens of the context that conversation and answer use; 0 if the partner did not count them."""
        return self.prompt_tokens + self.tokens if self.counted and self.tokens else 0

    def line(self, context: int) -> str:
        """The figures in one line: `52.1 tokens/s · first after 0.08 s · 120 of 8192 tokens of context (1%)`."""
        parts = ["stopped"] if self.stopped else []
        if self.rate:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first after {self.first:.2f} s")
        if self.used:
            share = f" of {context} tokens of context ({self.used / context:.0%})" if context else " tokens of context"
            parts.append(f"{self.used}{share}")
        elif self.tokens:
            parts.append(f"at least {self.tokens} tokens")
        return " · ".join(parts)


class ReplyMeter:
    """Measures one answer while it arrives: created when the question is asked, then given every piece.

    If the partner does not count tokens, or only at the end, which a stopped answer does not reach, each piece of text
    counts as one token: a lower bound, because every piece holds at least one.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._asked = now()
        self._first: float | None = None
        self._at_first = 0
        self._pieces = 0
        self._prompt_tokens = self._tokens = 0

    def take(self, piece: Piece) -> None:
        """Add a piece of the answer."""
        self._prompt_tokens = piece.prompt_tokens or self._prompt_tokens
        self._tokens = piece.tokens or self._tokens
        if piece.text or piece.reasoning:
            self._pieces += 1
            if self._first is None:
                self._first, self._at_first = self._now(), max(self._tokens, 1)

    def reply(self, *, stopped: bool) -> Reply:
        """The figures, once the answer has ended."""
        counted = bool(self._tokens) or not self._pieces
        tokens = self._tokens or self._pieces
        if self._first is None:
            return Reply(self._prompt_tokens, tokens, None, 0.0, stopped, counted)
        seconds = self._now() - self._first
        known = counted and tokens > self._at_first and seconds > 0
        rate = (tokens - self._at_first) / seconds if known else 0.0
        return Reply(self._prompt_tokens, tokens, self._first - self._asked, rate, stopped, counted)


class Conversation:
    """The turns so far, and the settings for the next answer. Changed by the commands of one chat."""

    def __init__(self, system: str = "", params: Mapping[str, Any] | None = None) -> None:
        self.system = system
        self.params: dict[str, Any] = dict(params or {})
        self.turns: list[Message] = []
        self.replies: list[Reply] = []

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, the system prompt first if there is one."""
        return [*([Message("system", self.system)] if self.system else []), *self.turns]

    def asking(self, question: str) -> list[Message]:
        """The conversation with one more question."""
        return [*self.messages, Message("user", question)]

    def remember(self, question: str, answer: str, reply: Reply) -> None:
        """Keep a turn, complete or stopped."""
        self.turns = [*self.turns, Message("user", question), Message("assistant", answer)]
        self.replies.append(reply)

    def take_back(self) -> str:
        """Forget the last answer and its question; return the question."""
        question = self.turns[-2].content
        self.turns = self.turns[:-2]
        return question

    def clear(self) -> None:
        """Forget every turn; the settings stay."""
        self.turns = []

    def choose(self, name: str, value: str) -> None:
        """Set a sampling parameter from text: JSON, or else the text itself; `default` resets it.

        Raises:
            InvalidParameter: there is no such parameter, or the value is not valid for it.
        """
        name = name.replace("-", "_")
        _check_name(name)
        if value == DEFAULT:
            self.params.pop(name, None)
            return
        chosen = self.params | {name: _read(value)}
        _check(chosen)
        self.params = chosen

    def save(self, path: Path) -> None:
        """Write messages and settings as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        messages = [{"role": each.role, "content": each.content} for each in self.messages]
        text = json.dumps({"messages": messages, "params": self.params}, ensure_ascii=False, indent=2, default=list)
        try:
            path.expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("/save", f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Continue from a file that `save` wrote, or from a list of messages. Takes all of it or nothing.

        Raises:
            ConfigError: the file cannot be read, or does not hold a conversation.
        """
        try:
            content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError("/load", f"{path} cannot be read: {error}") from error
        try:
            system, turns = _read_messages(content["messages"] if isinstance(content, dict) else content)
            params = dict(content.get("params", {})) if isinstance(content, dict) else self.params
            _check(params)
        except (KeyError, TypeError, ValueError, RequestError) as error:
            raise ConfigError("/load", f"{path} holds no conversation: {error}") from error
        self.system, self.turns, self.params = system, turns, params


def _check_name(name: str) -> None:
    if name not in SETTABLE:
        raise InvalidParameter(name, "is not a sampling parameter; /set lists them", code="unknown_parameter")


def _check(params: Mapping[str, Any]) -> None:
    for name in params:
        _check_name(name)
    SamplingParams.from_fields({"max_tokens": None, **params})


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read_messages(given: Any) -> tuple[str, list[Message]]:
    """The system prompt, and the turns, which must be pairs of question and answer."""
    messages = [Message(str(each["role"]), str(each["content"])) for each in given]
    system = messages.pop(0).content if messages and messages[0].role == "system" else ""
    roles = [message.role for message in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError("after the system prompt, messages must be of user and assistant in turn")
    return system, messages
