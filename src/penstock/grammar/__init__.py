"""Answers that keep to a form: JSON schemas, regular expressions, choices and grammars, and documents that always end.

Decides which tokens may come next in an answer, and that its end stays within reach. Knows a vocabulary as the bytes
of its tokens, and neither models nor requests. The automata are llguidance's.
"""

from __future__ import annotations

from penstock.grammar.library import GrammarLibrary
from penstock.grammar.vocabulary import Vocabulary

__all__ = ["GrammarLibrary", "Vocabulary"]
