"""The document of a grammar that takes the fewest tokens, found by an automaton of our own.

llguidance says which tokens may come next, not how few a document can take. So this package reads the grammar a second
time, into pieces that can be searched breadth first, a token a level. It may read less than llguidance does, and then
raises. A difference between the two automata costs a search and never a wrong answer: the caller tries what is found on
llguidance's before using it.

Everything else of the package is private to it; import-linter holds the rest of Penstock to the names below. Inside,
`reading` turns a grammar into pieces (`parts`, `schema_parts` and `schema_facts` for JSON schemas), whose smallest are
automata over bytes (`lexemes`, `numerals`, and `expression` with `expression_reader` for regular expressions), and
`search` walks them along the vocabulary.
"""

from __future__ import annotations

from penstock.contract.grammar import Grammar
from penstock.grammar.fewest.expression_reader import Unreadable
from penstock.grammar.fewest.reading import parts_of
from penstock.grammar.fewest.search import TooFar, search_parts
from penstock.grammar.token_trie import TokenTrie

__all__ = ["TooFar", "Unreadable", "fewest_tokens"]


def fewest_tokens(grammar: Grammar, trie: TokenTrie, most: int) -> tuple[int, ...] | None:
    """Token ids of a document with the fewest tokens, the end token not included; None if it has `most` or more.

    Args:
        grammar: one that llguidance compiles.
        trie: the vocabulary.
        most: a document of this many tokens is known already, or is too long to be of use.

    Raises:
        Unreadable: the grammar uses what this package does not read.
        TooFar: the search would take more steps than it is allowed.
    """
    return search_parts(parts_of(grammar), trie, most)
