"""The grammar of an answer: a plain value, so that a plan that carries it can be printed, written and replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["JSON_OBJECT", "Grammar", "GrammarKind"]


class GrammarKind(StrEnum):
    """The language that a grammar is written in. The words are the keys of the request field `structured_outputs`."""

    JSON = "json"
    """A JSON schema, as JSON text."""
    REGEX = "regex"
    """A regular expression that the whole answer matches."""
    CHOICE = "choice"
    """A JSON list of strings, one of which is the answer."""
    GRAMMAR = "grammar"
    """A context-free grammar: Lark with the rule `start`, or GBNF with the rule `root`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of one answer. Made by `penstock.sampling`, read by `grammar`.

    Attributes:
        kind: the language of `source`.
        ending: once the grammar has passed `Grammars.check`, the tokens of a document that fits the answer, without the
            end-of-sequence token: a grammar that has one is not judged again, whichever process the runner is in.
        size: likewise, bytes of memory that the compiled grammar takes.

    Two grammars are equal if their kinds and sources are.
    """

    kind: GrammarKind
    source: str
    ending: tuple[int, ...] | None = field(default=None, compare=False)
    size: int = field(default=0, compare=False)


JSON_OBJECT = Grammar(GrammarKind.JSON, '{"type":"object"}')
"""Any JSON object: what OpenAI calls JSON mode."""
