"""A vocabulary without a model: bytes, common pieces of JSON and of words; and a writer that picks at random."""

from __future__ import annotations

import random

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar import GrammarLibrary, Vocabulary
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Speller
from penstock.grammar.worker import judge

WORDS = ["the", "and", "name", "id", "value", "true", "false", "null", "one", "two", "ing", "er", "10", "20", "00"]
WORDS += ["2024", "-01", "@", ".com", "a1", "é", "ü", "中", "😀", "Street"]
PIECES = [
    '{"',
    '":',
    '": ',
    '",',
    '", "',
    '"}',
    '"]',
    "{}",
    "[]",
    '""',
    "}}",
    "]}",
    "},",
    '":"',
    '":{"',
    ":[",
    "],",
    "[{",
]
END = 256
VOCABULARY = Vocabulary(
    tokens=(
        *(bytes([byte]) for byte in range(256)),
        b"",
        *(piece.encode() for piece in PIECES),
        *(word.encode() for word in WORDS),
        *(b" " + word.encode() for word in WORDS),
    ),
    special=(END,),
    eos=(END,),
)


class JudgedHere:
    """Stands for the compiling process but judges in this one: tests of verdicts need no process."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller

    def judge(self, grammar: Grammar, tight: bool = False) -> Verdict:
        return judge(grammar, self._speller, tight)

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def library(vocabulary: Vocabulary = VOCABULARY) -> GrammarLibrary:
    one = GrammarLibrary(lambda: vocabulary)
    one._worker = JudgedHere(one._ready())
    return one


def schema(source: str) -> Grammar:
    return Grammar(GrammarKind.JSON, source)


def allowed(mask: bytes) -> list[int]:
    return [id_ for id_ in range(len(VOCABULARY.tokens)) if mask[id_ >> 3] >> (id_ & 7) & 1]


def written(lib: GrammarLibrary, grammar: Grammar, limit: int, seed: int) -> tuple[bytes, int]:
    """An answer in which every allowed token is equally likely: its bytes, and its tokens with the end."""
    rng, matcher, taken = random.Random(seed), lib.matcher(grammar, limit), []
    while len(taken) < limit:
        choices = allowed(matcher.mask())
        token = rng.choice(choices)
        for _ in range(8):
            if matcher.take(token):
                break
            token = rng.choice(choices)
        else:
            token = matcher.closing()
            assert matcher.take(token)
        taken.append(token)
        if token == END:
            return b"".join(VOCABULARY.tokens[id_] for id_ in taken), len(taken)
    raise AssertionError(f"no end within {limit}: {taken}")
