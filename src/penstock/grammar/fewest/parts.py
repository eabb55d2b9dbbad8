"""Parts: the nonterminals of a document. Each expands into one of several sequences of parts and lexemes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.grammar.fewest.lexemes import Lexeme, Spaces, Text

__all__ = ["COLON", "COMMA", "SPACES", "Choice", "Part", "Piece", "constant", "text_of"]


class Part:
    """A nonterminal: one of several sequences of pieces."""

    def ways(self) -> list[tuple[Piece, ...]]:
        """The alternatives, each a sequence of pieces."""
        raise NotImplementedError


Piece = Part | Lexeme


class Choice(Part):
    """Alternatives that are all known from the start."""

    def __init__(self, ways: list[tuple[Piece, ...]]) -> None:
        self._ways = ways

    def ways(self) -> list[tuple[Piece, ...]]:
        """See `Part`."""
        return self._ways


SPACES = Spaces()
COMMA, COLON = (SPACES, Text(b","), SPACES), (SPACES, Text(b":"), SPACES)


def constant(value: Any) -> Iterator[Piece]:
    """The pieces of one value, with an optional space where JSON allows whitespace."""
    match value:
        case dict():
            yield Text(b"{")
            for number, (name, inner) in enumerate(value.items()):
                yield from COMMA if number else (SPACES,)
                yield from (text_of(name), *COLON, *constant(inner))
            yield from (SPACES, Text(b"}"))
        case list():
            yield Text(b"[")
            for number, inner in enumerate(value):
                yield from COMMA if number else (SPACES,)
                yield from constant(inner)
            yield from (SPACES, Text(b"]"))
        case float() if value.is_integer():
            yield text_of(int(value))
        case _:
            yield text_of(value)


def text_of(value: Any) -> Text:
    """A JSON value other than an array or object, written as llguidance writes it."""
    return Text(json.dumps(value, ensure_ascii=False).encode())
