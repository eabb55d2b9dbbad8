"""Structured output: which tokens may come next under a JSON schema, regular expression, choice or grammar.

An answer always ends as a whole document: at every token an ending is known that fits in the tokens that are left.
Knows a vocabulary as the bytes of its tokens, and neither models nor requests. The automata that mask tokens are
llguidance's; `fewest` has one of our own, for the one question that those do not answer.
"""

from __future__ import annotations

from penstock.grammar.library import GrammarLibrary
from penstock.grammar.vocabulary import Vocabulary

__all__ = ["GrammarLibrary", "Vocabulary"]
