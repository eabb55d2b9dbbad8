"""Rendering a conversation with the model's own chat template, in a sandbox.

Decides how messages become text: Jinja with the settings and functions that templates are written for (the ones that
transformers documents: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, plain `tojson`, `generation`
blocks), no attribute outside the sandbox, and a bounded output. Templates come from the model file only, never from a
request.

The sandbox bounds `range`; here repetition, powers and printf-style widths are bounded too, and the output is. A
template that only loops is not: rendering happens off the event loop, and the template is the operator's own choice.

Does not know token ids. Invariant: a control token inside a message never reaches the rendered text as itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.contract.errors import InvalidParameter, ModelFileError
from penstock.contract.request import Message
from penstock.text.control_tokens import ControlTokens, RenderedChat
from penstock.text.unicode_text import require_unicode

__all__ = ["ChatTemplate"]

_ROLE = re.compile(r"[a-z_]{1,32}")
_OUTPUT_PER_INPUT = 4
_OUTPUT_EXTRA = 64 * 1024
_MOST_WORDS = 400  # a template may put whole messages into its complaint

# What a template that meets a conversation it was not written for raises, beside Jinja's own errors.
_TEMPLATE_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)


class ChatTemplate:
    """A compiled chat template; immutable, safe to render from several threads.

    Args:
        source: the Jinja source.
        file: where it came from, for errors.
        key: the key inside that file; "" when the file is the template.
        special_tokens: template variables such as `bos_token` and `eos_token`, by name.
        control_tokens: what must not be forged by message content.
        now: the clock behind `strftime_now`.

    Raises:
        ModelFileError: the source is not valid Jinja; names the line.
    """

    __slots__ = ("_control_tokens", "_special_tokens", "_template")

    def __init__(
        self,
        source: str,
        *,
        file: str,
        key: str = "",
        special_tokens: Mapping[str, str],
        control_tokens: ControlTokens,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._template = _compile(source, file, key, now)
        self._special_tokens = dict(special_tokens)
        self._control_tokens = control_tokens

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> RenderedChat:
        """The conversation as the model expects it.

        Args:
            messages: at least one; roles are lower-case words.
            add_generation_prompt: end with the opening of an assistant turn, so that the model answers.

        Raises:
            InvalidParameter: no messages, a malformed role, text with a lone surrogate, or the template refuses the
                conversation (its own words are the message) or writes more than 4 times the input and 64 KiB.
        """
        _check_messages(messages)
        contents, stand_ins = self._control_tokens.disarm([message.content for message in messages])
        turns = [{"role": m.role, "content": c} for m, c in zip(messages, contents, strict=True)]
        limit = _OUTPUT_PER_INPUT * sum(len(m.role) + len(m.content) for m in messages) + _OUTPUT_EXTRA
        return RenderedChat(self._write(turns, add_generation_prompt, limit), stand_ins)

    def _write(self, turns: list[dict[str, str]], add_generation_prompt: bool, limit: int) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                **self._special_tokens,
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                size += len(piece)
                if size > limit:
                    raise InvalidParameter(
                        "messages", f"the chat template writes more than {limit} characters for them"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidParameter("messages", str(error.message or error)[:_MOST_WORDS]) from error
        except _TEMPLATE_FAILURES as error:
            reason = f"the model's chat template cannot render them: {type(error).__name__}: {error}"
            raise InvalidParameter("messages", reason[:_MOST_WORDS]) from error
        return "".join(pieces)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidParameter("messages", "must hold at least one message")
    for index, message in enumerate(messages):
        if not _ROLE.fullmatch(message.role):
            raise InvalidParameter(f"messages.{index}.role", "must be 1 to 32 lower-case letters or underscores")
        require_unicode(message.content, f"messages.{index}.content")


def _compile(source: str, file: str, key: str, now: Callable[[], datetime]) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(file, key, f"chat template, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ModelFileError(file, key, "chat template is nested too deeply") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with operators bounded that can build a huge value out of a short template."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not numbers and operator == "*" and _size(left) * _size(right) > _OUTPUT_EXTRA:
            raise SecurityError("the chat template repeats a value too often")
        if not numbers and operator == "%" and re.search(r"%[^a-zA-Z%]*(\d{4}|\*)", str(left)):
            raise SecurityError("the chat template formats a value too wide")
        if operator == "**" and numbers and max(abs(left), abs(right)) > 1024:
            raise SecurityError("the chat template computes too large a power")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    if isinstance(value, int | float):
        return max(int(value), 0)
    return len(value) if hasattr(value, "__len__") else 1


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; when rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own annotation)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put \\u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
