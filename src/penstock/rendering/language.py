"""The language of chat templates: Jinja with the settings and functions that templates are written for.

These are the ones that transformers documents: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, plain
`tojson`, `generation` blocks, and no attribute outside the sandbox. CPU time and memory are not bounded here, because
operators, methods and filters can build a huge value in too many ways: the process's limits bound them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["CannotCompile", "CannotRender", "Template"]

_MOST_WORDS = 400  # in characters: a template may put whole messages into its error

# Besides Jinja's own errors, what a template raises for a conversation it was not written for.
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class CannotCompile(Exception):
    """The source is not a valid template; says in which line, unless it is nested too deeply."""


class CannotRender(Exception):
    """The template refuses what it was given, in its own words, or fails, or writes too much."""


class Template:
    """A compiled template.

    Raises:
        CannotCompile: the source is not valid Jinja, or nested too deeply.

    Attributes:
        declared: the variables that it reads from its caller.
    """

    def __init__(self, source: str) -> None:
        self._now = datetime.min
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: self._now.strftime(layout)
        try:
            declared = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CannotCompile(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:  # Python's compiler has bounds of its own
            raise CannotCompile("chat template is nested too deeply") from error
        self.declared = frozenset(declared - environment.globals.keys())

    def render(self, given: Mapping[str, Any], most_chars: int, now: datetime) -> str:
        """Return what the template writes.

        Args:
            given: the template's variables.
            most_chars: how many characters it may write.
            now: the time that `strftime_now` formats.

        Raises:
            CannotRender: the template refuses, fails, or writes more than `most_chars`.
        """
        self._now = now
        pieces, size = [], 0
        try:
            for piece in self._template.generate(**given):
                size += len(piece)
                if size > most_chars:
                    raise CannotRender(f"the chat template writes more than {most_chars} characters for them")
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise CannotRender(str(error.message or error)[:_MOST_WORDS]) from error
        except _FAILURES as error:
            reason = f"the model's chat template cannot render them: {type(error).__name__}: {error}"
            raise CannotRender(reason[:_MOST_WORDS]) from error
        return "".join(pieces)


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
