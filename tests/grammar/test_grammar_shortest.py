"""That a tight request is refused only where no document fits: against a search that leaves nothing out."""

from __future__ import annotations

import json

import pytest
from grammar_harness import END, VOCABULARY, allowed, library, schema
from grammar_schemas import schemas

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.compiling import compile_grammar

FORMS = [schema(json.dumps(one)) for one in schemas()] + [
    Grammar(GrammarKind.REGEX, "(the|and|the and){2,3}[0-9]+"),
    Grammar(GrammarKind.REGEX, ".*name.*value"),
    Grammar(GrammarKind.REGEX, "[a-z]*z|2024-01"),
    Grammar(GrammarKind.CHOICE, '["Street","a1b2","201","t2024"]'),
    Grammar(GrammarKind.CHOICE, '["nothing","idid","id id id"]'),
    Grammar(GrammarKind.GRAMMAR, 'start: "a" start "b" | "true" | "{\\":\\"}"'),
]


@pytest.fixture(scope="module")
def lib():
    return library()


def fewest(lib, grammar: Grammar, most_texts: int) -> int | None:
    """Tokens of the shortest document, its end included, by trying every token everywhere; None beyond `most_texts`.

    The only shortcut: two spellings of one text lead to the same state.
    """
    level, seen, tokens = {b"": compile_grammar(grammar, lib._ready())}, set(), 1
    while level:
        following = {}
        for text, matcher in level.items():
            if matcher.is_accepting():
                return tokens
            for id_ in allowed(matcher.compute_bitmask()):
                longer = text + VOCABULARY.tokens[id_]
                if id_ == END or longer in seen:
                    continue
                seen.add(longer)
                if len(seen) > most_texts:
                    return None
                following[longer] = matcher.deep_copy()
                following[longer].consume_token(id_)
        level, tokens = following, tokens + 1
    raise AssertionError("no document")


def found(lib, grammar: Grammar) -> int:
    with pytest.raises(InvalidParameter, match="shortest document found takes") as refused:
        lib.check(grammar, 1)
    return int(refused.value.message.split("takes ")[1].split()[0])


def compared(lib, grammars, most_texts: int) -> int:
    """How many of the grammars are small enough to be proved; each that is must be right."""
    proved = 0
    for grammar in grammars:
        fewest_tokens = fewest(lib, grammar, most_texts)
        if fewest_tokens is not None:
            proved += 1
            assert found(lib, grammar) == fewest_tokens, grammar
            lib.check(grammar, fewest_tokens)
    return proved


def test_a_document_is_refused_only_where_none_fits(lib):
    assert compared(lib, FORMS[::6] + FORMS[-6:], 3_000) >= 20


@pytest.mark.deep
def test_of_all_forms_those_that_can_be_proved_are_right(lib):
    assert compared(lib, FORMS, 60_000) >= 110
