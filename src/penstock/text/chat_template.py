"""Renders a conversation with the model's chat template.

Decides how messages are passed to a template, and checks what it writes. The template is a program that comes with the
model, so it runs in a separate process with limits on time and memory: see `penstock.rendering`. Templates come from
the model's files or the operator, never from a request.

Does not know token ids or Jinja. Invariant: a control token inside a message is never one in the rendered text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import PurePath
from typing import Any

from penstock.contract.errors import InvalidParameter, ModelFileError
from penstock.contract.request import ChatPrompt, Message, TemplateValue
from penstock.rendering import Renderer, TemplateFault, TemplateRefusal, shared_renderer
from penstock.text.control_tokens import ControlTokens, RenderedChat
from penstock.text.conversation import as_definitions, as_turns, check_calls, strings_in, with_strings
from penstock.text.plain_tools import with_calls_in_words, with_tools_in_words
from penstock.text.unicode_text import require_unicode

__all__ = ["ChatTemplate"]

_ROLES = ("system", "user", "assistant")
_ROLE = re.compile(r"[a-z_]{1,32}")
_OUTPUT_PER_INPUT = 4
_OUTPUT_EXTRA = 64 * 1024
_MARKS = range(0x100000, 0x10FFFE)  # Supplementary Private Use Area-B; stand-ins come from area A
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_ASKS_FOR_NULL = re.compile(r"content['\"]?\]?\s+is\s+(?:not\s+)?none\b")
_ASKS_FOR_THINKING = re.compile(r"\w\.thinking\b|['\"]thinking['\"]")


class ChatTemplate:
    """A valid chat template; immutable, safe to render from several threads.

    Args:
        source: the Jinja source.
        file: the file that it came from, for errors.
        key: the key inside that file; "" when the file is the template.
        special_tokens: template variables such as `bos_token` and `eos_token`, by name.
        control_tokens: the tokens that message content must not forge.
        now: the clock behind `strftime_now`.
        renderer: renders the template; by default the renderer of this process.

    Raises:
        ModelFileError: the source is not valid Jinja (the error names the line), or is too costly to compile.
        Unavailable: the process that compiles it was killed repeatedly.
    """

    __slots__ = (
        *("_control_tokens", "_declared", "_name", "_now", "_null_content", "_renderer", "_special_tokens"),
        *("_thinking", "source"),
    )

    def __init__(
        self,
        source: str,
        *,
        file: str,
        key: str = "",
        special_tokens: Mapping[str, str],
        control_tokens: ControlTokens,
        now: Callable[[], datetime] = datetime.now,
        renderer: Renderer | None = None,
    ) -> None:
        self.source = source
        self._name = PurePath(file).name
        self._now = now
        self._renderer = renderer or shared_renderer()
        try:
            self._declared = self._renderer.declared(source)
        except TemplateFault as fault:
            raise ModelFileError(file, key, str(fault)) from fault
        self._null_content = _ASKS_FOR_NULL.search(source) is not None
        self._thinking = _ASKS_FOR_THINKING.search(source) is not None and "reasoning_content" not in source
        self._special_tokens = dict(special_tokens)
        self._control_tokens = control_tokens

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads tools; if not, they are described in the messages."""
        return "tools" in self._declared

    @property
    def variables(self) -> frozenset[str]:
        """The variables that a caller may set: the template reads them and nothing else provides them."""
        return self._declared - _RESERVED - frozenset(self._special_tokens)

    @property
    def named_roles(self) -> frozenset[str]:
        """Roles for which the template shows a message's `name`, tried in a conversation with one turn per role."""
        return frozenset(role for role in _ROLES if self._shows_name(role))

    def _shows_name(self, role: str) -> bool:
        turns = [Message(each, "Hello.", name="Ada" if each == role else "") for each in _ROLES[_ROLES.index(role) :]]
        if role == "assistant":  # a conversation begins with the user
            turns = [Message("user", "Hello."), *turns]
        try:
            self.render(turns)
        except InvalidParameter:  # the template has no place for the name, or for the role
            return False
        return True

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> RenderedChat:
        """Render the conversation as the model expects it; like `render_prompt`, with default options."""
        return self.render_prompt(ChatPrompt(tuple(messages), add_generation_prompt=add_generation_prompt))

    def render_prompt(self, prompt: ChatPrompt, tenant: str = "") -> RenderedChat:
        """Render the conversation as the model expects it.

        Args:
            prompt: the conversation.
            tenant: the tenant that it is rendered for: one tenant's renderings cannot occupy all workers.

        Raises:
            InvalidParameter: no messages, a malformed role, text with a lone surrogate, a call whose arguments are not
                a JSON object, a variable that the template does not read, a name that it has no place for, a last
                message that cannot be continued; or the template refuses the conversation (its own words are the
                message), writes more than 4 times the input plus 65,536 characters, or takes too much time or memory.
            Overloaded: too many conversations wait to be rendered.
            Unavailable: the process that renders it was killed repeatedly.
        """
        _check_messages(prompt.messages)
        self._check_variables(prompt.template_variables)
        rendered = self._render(prompt, tenant)
        named = [index for index, message in enumerate(prompt.messages) if message.name and message.role != "tool"]
        if named:
            nameless = tuple(m if m.role == "tool" else replace(m, name="") for m in prompt.messages)
            if self._render(replace(prompt, messages=nameless), tenant).text == rendered.text:
                where = f"messages.{named[0]}.name"
                raise InvalidParameter(where, f"{where}: this model's chat template has no place for names.")
        return rendered

    def _render(self, prompt: ChatPrompt, tenant: str) -> RenderedChat:
        messages = prompt.messages
        if "tool_calls" not in self.source and any(m.tool_calls or m.role == "tool" for m in messages):
            messages = with_calls_in_words(messages)
        if prompt.tools and not self.takes_tools:
            messages = with_tools_in_words(messages, prompt.tools)
        tools = as_definitions(prompt.tools) if self.takes_tools else None
        turns = as_turns(messages, null_content=self._null_content, thinking=self._thinking)
        value = [turns, tools, dict(prompt.template_variables)]
        strings = list(strings_in(value))
        mark = _end_mark(strings) if prompt.continue_final_message else ""
        disarmed, stand_ins = self._control_tokens.disarm(strings)
        turns, tools, variables = with_strings(value, iter(disarmed))
        if mark:
            _mark_end(turns[-1], mark)
        limit = _OUTPUT_PER_INPUT * sum(map(len, strings)) + _OUTPUT_EXTRA
        given = {"messages": turns, "tools": tools, "documents": None, **variables}
        given["add_generation_prompt"] = prompt.add_generation_prompt and not mark
        text = self._write(given, limit, tenant)
        return RenderedChat(_cut_at(text, mark) if mark else text, stand_ins)

    def _check_variables(self, variables: Sequence[tuple[str, TemplateValue]]) -> None:
        for name, value in variables:
            where = f"chat_template_kwargs.{name}"
            if name not in self.variables:
                allowed = ", ".join(sorted(self.variables)) or "none"
                raise InvalidParameter(
                    where, f"{where}: this model's chat template reads no such variable ({allowed})."
                )
            if isinstance(value, str):
                require_unicode(value, where)

    def _write(self, given: Mapping[str, Any], limit: int, tenant: str) -> str:
        try:
            return self._renderer.render(self.source, {**self._special_tokens, **given}, limit, self._now(), tenant)
        except TemplateRefusal as refusal:
            if refusal.too_costly:
                message = f"the model's chat template ({self._name}) {refusal}"
                raise InvalidParameter("messages", message, code="chat_template_too_costly") from refusal
            raise InvalidParameter("messages", str(refusal)) from refusal


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidParameter("messages", "must hold at least one message")
    for index, message in enumerate(messages):
        if not _ROLE.fullmatch(message.role):
            raise InvalidParameter(f"messages.{index}.role", "must be 1 to 32 lower-case letters or underscores")
        for field in ("content", "name", "tool_call_id", "reasoning"):
            require_unicode(getattr(message, field), f"messages.{index}.{field}")
        check_calls(message, f"messages.{index}")


def _end_mark(strings: Sequence[str]) -> str:
    """A private-use character that does not occur in the conversation."""
    used = set().union(*strings)
    return next(_unused_marks(used))


def _unused_marks(used: set[str]) -> Iterator[str]:
    yield from (chr(code) for code in _MARKS if chr(code) not in used)
    raise InvalidParameter("messages", "the messages use every private-use character")


def _mark_end(turn: dict[str, Any], mark: str) -> None:
    """Put the mark where the model is to continue: after the last message's text."""
    if not isinstance(turn["content"], str) or "tool_calls" in turn:
        raise InvalidParameter("continue_final_message", "the last message must have text and no calls to be continued")
    turn["content"] += mark


def _cut_at(text: str, mark: str) -> str:
    if mark not in text:
        reason = "continue_final_message: this model's chat template does not show the last message"
        raise InvalidParameter("continue_final_message", reason)
    return text[: text.rindex(mark)]
