"""Hints: literals and examples read off a grammar's own text, from which a short document may be made.

A hint may be wrong: each is tried on the automaton before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.example import example_of

__all__ = ["hints_of"]

_MOST = 64
_FORMATS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P0D",
    "email": "a@a",
    "hostname": "a",
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "uri": "a:",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
"""A short text of each format, from the standards that define them (RFC 3339, 4122, 5321, 1123, 4291, 3986)."""
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)+)"|/((?:[^/\\\n]|\\.)+)/')
"""In Lark and GBNF: a literal or a regular expression."""


def hints_of(grammar: Grammar) -> tuple[bytes, ...]:
    """Pieces of documents of a grammar that compiles, shortest first; for JSON, contents of strings."""
    match grammar.kind:
        case GrammarKind.JSON:
            found: Iterator[str] = (
                json.dumps(text, ensure_ascii=False)[1:-1] for text in _strings(json.loads(grammar.source))
            )
        case GrammarKind.REGEX:
            found = _examples(grammar.source)
        case GrammarKind.CHOICE:
            found = iter(json.loads(grammar.source))
        case GrammarKind.GRAMMAR:
            found = _literals(grammar.source)
    pieces = {text.encode() for text in found if text}
    return tuple(sorted(pieces, key=lambda piece: (len(piece), piece))[:_MOST])


def _examples(expression: str) -> Iterator[str]:
    example = example_of(expression)
    if example is not None:
        yield example


def _strings(schema: Any) -> Iterator[str]:
    """Examples of the patterns and formats anywhere in a schema."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _strings(inner)
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            yield from _examples(value)
        elif keyword == "format" and isinstance(value, str):
            yield _FORMATS.get(value, "")
        else:
            yield from _strings(value)
        if keyword == "patternProperties" and isinstance(value, dict):
            for expression in value:
                yield from _examples(expression)


def _literals(source: str) -> Iterator[str]:
    for literal, expression in _QUOTED.findall(source):
        if expression:
            yield from _examples(expression)
        elif "\\" not in literal:
            yield literal
