"""Finds the document of a grammar that takes the fewest tokens, with an automaton of our own.

llguidance says which tokens may come next, not how few a document can take. So this package reads the grammar a second
time, into pieces that can be searched breadth first, one token per level. It supports less than llguidance does, and
raises for the rest. A difference between the two automata costs a search and never causes a wrong answer: the caller
checks the result on llguidance's automaton before using it.

Everything else in the package is private to it; import-linter holds the rest of Penstock to the names below. Inside,
`reading` turns a grammar into pieces (`parts`, `schema_parts` and `schema_facts` for JSON schemas), the smallest of
which are automata over bytes (`lexemes`, `numerals`, and `expression` with `expression_reader` for regular
expressions), and `search` walks them along the vocabulary.
"""

from __future__ import annotations

from penstock.contract.grammar import Grammar
from penstock.grammar.fewest.expression_reader import Unreadable
from penstock.grammar.fewest.reading import parts_of
from penstock.grammar.fewest.search import TooFar, search_parts
from penstock.grammar.token_trie import TokenTrie

__all__ = ["TooFar", "Unreadable", "fewest_tokens"]


def fewest_tokens(grammar: Grammar, trie: TokenTrie, most: int) -> tuple[int, ...] | None:
    """Token ids of a document with the fewest tokens, without the end token; None if none has fewer than `most`.

    Args:
        grammar: one that llguidance compiles.
        trie: the vocabulary.
        most: a document of this many tokens is known already, or is too long to be of use.

    Raises:
        Unreadable: the grammar uses something that this package does not support.
        TooFar: the search exceeds its limit on steps.
    """
    return search_parts(parts_of(grammar), trie, most)
