"""What the documents of a grammar are made of, so that a search knows more of them than which token may come next.

Reads JSON schemas, choices and regular expressions; what is not read is `Unreadable`. Knows no tokens. Whoever finds a
document here tries it on the automaton proper before it is used, so that a difference costs a search, and no right
answer.
"""

from __future__ import annotations

import json

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.expression import Expression, Unreadable
from penstock.grammar.lexemes import Matching, Text
from penstock.grammar.parts import Choice, Piece
from penstock.grammar.schema_parts import document_of

__all__ = ["parts_of"]


def parts_of(grammar: Grammar) -> tuple[Piece, ...]:
    """What the documents of a grammar that compiles are made of.

    Raises:
        Unreadable: it has what is not read here; where parts are unfolded too.
    """
    match grammar.kind:
        case GrammarKind.JSON:
            return (document_of(json.loads(grammar.source)),)
        case GrammarKind.CHOICE:
            return (Choice([(Text(text.encode()),) for text in json.loads(grammar.source)]),)
        case GrammarKind.REGEX:
            return (Matching([Expression(grammar.source, anywhere=False)]),)
    raise Unreadable(grammar.kind)
