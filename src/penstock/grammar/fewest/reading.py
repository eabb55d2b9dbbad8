"""Turns a grammar into the pieces that its documents are made of.

Reads JSON schemas, choices and regular expressions; Lark and GBNF grammars are `Unreadable`. Knows no tokens.
"""

from __future__ import annotations

import json

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.fewest.expression import Expression, Unreadable
from penstock.grammar.fewest.lexemes import Matching, Text
from penstock.grammar.fewest.parts import Choice, Piece
from penstock.grammar.fewest.schema_parts import document_of

__all__ = ["parts_of"]


def parts_of(grammar: Grammar) -> tuple[Piece, ...]:
    """The pieces of the documents of a grammar that llguidance compiles.

    Raises:
        Unreadable: the grammar uses something unsupported. Expanding a part may raise it too.
    """
    match grammar.kind:
        case GrammarKind.JSON:
            return (document_of(json.loads(grammar.source)),)
        case GrammarKind.CHOICE:
            return (Choice([(Text(text.encode()),) for text in json.loads(grammar.source)]),)
        case GrammarKind.REGEX:
            return (Matching([Expression(grammar.source, anywhere=False)]),)
    raise Unreadable(grammar.kind)
