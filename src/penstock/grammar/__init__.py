"""Structured output: says which tokens may come next under a JSON schema, regular expression, choice or grammar.

An answer always ends as a whole document: at every token, the matcher knows an ending that fits in the tokens left.
The package knows a vocabulary as the bytes of its tokens, and neither models nor requests. llguidance's automata mask
the tokens; `fewest` has an automaton of our own, for what llguidance does not say: how few tokens a document can take.
"""

from __future__ import annotations

from penstock.grammar.library import GrammarLibrary
from penstock.grammar.vocabulary import Vocabulary

__all__ = ["GrammarLibrary", "Vocabulary"]
