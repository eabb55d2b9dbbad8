"""Compiles a `Grammar` to llguidance's automaton, with limits on its size.

Three choices are made here. JSON whitespace is at most one space, because a model could write it without end. Strings
have no code-point escapes unless the schema needs them. Forced text may be spelled in any tokens. Deterministic: the
same grammar gives the same automaton in every process.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.schema_check import read_schema
from penstock.grammar.vocabulary import Speller

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["compile_grammar"]

_NEEDS_CODE = re.compile(r"\\u00(?:0[0-7bef]|1|7f)|\\x[017]")
"""Matches, in a schema as JSON, a character that only a code-point escape can write; in a pattern, a possible one."""

_PLACE = re.compile(r"^at \d+\(\d+\): ")
_FIELD = "structured_outputs"
_FREE_SPELLING = '%llguidance {"no_forcing": true}'
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    "coerce_one_of": False,
    "lenient": False,
}


def compile_grammar(grammar: Grammar, speller: Speller) -> LLMatcher:
    """The automaton of a grammar, in its initial state.

    Raises:
        InvalidParameter: the grammar cannot be read, uses an unsupported feature, or is too large.
    """
    matcher = LLMatcher(speller.backend, _definition(grammar), log_level=0, limits=_limits())
    if matcher.is_error():
        raise InvalidParameter(_FIELD, f"cannot be compiled: {_reason(matcher.get_error(), grammar.kind)}")
    return matcher


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def _definition(grammar: Grammar) -> str:
    """The grammar in Lark. Without `no_forcing`, forced text would be masked to one spelling, byte by byte."""
    return f"{_FREE_SPELLING}\n{_rules(grammar)}"


def _rules(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON:
            schema = read_schema(grammar.source)
            return f"start: %json {json.dumps(schema | {'x-guidance': _JSON_OPTIONS | _escapes(schema)})}"
        case GrammarKind.REGEX:
            rules: str = json.loads(LLMatcher.grammar_from_regex(grammar.source))["grammars"][0]["lark_grammar"]
            return rules
        case GrammarKind.CHOICE:
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source))
            return "start: " + " | ".join(texts)
        case GrammarKind.GRAMMAR:
            return _lark(grammar.source)


def _escapes(schema: dict[str, Any]) -> dict[str, str]:
    """The escapes allowed in strings: no code-point escapes unless the schema needs them.

    A property name written with them would match as an additional property, although it decodes to one of the schema's.
    """
    return {} if _NEEDS_CODE.search(json.dumps(schema)) else {"json_allowed_escapes": 'nrbtf\\"'}


def _lark(source: str) -> str:
    try:
        return any_to_lark(source)
    except Exception as error:  # the converter raises bare exceptions for what it cannot read
        raise InvalidParameter(_FIELD, f"the grammar is not readable: {_one_line(str(error))}") from error


def _reason(error: str, kind: GrammarKind) -> str:
    """What is wrong. llguidance names a place in Lark text, which only the author of a Lark or GBNF grammar knows."""
    if kind is GrammarKind.GRAMMAR:
        return _one_line(error)
    return _one_line(_PLACE.sub("", error.strip().partition("\n")[0]))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
