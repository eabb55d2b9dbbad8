"""Short texts read off regular expressions, judged by Python's own engine."""

from __future__ import annotations

import re

import pytest
from grammar_harness import library
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.example import example_of
from penstock.grammar.hints import hints_of

ATOMS = st.sampled_from(
    ["a", "foo", ".", "[a-z]", "[^a-z0]", r"\d", r"\.", r"\w", "é", "[]x]", r"[\]\[]", r"\x41", " "]
)
REPEATS = st.sampled_from(["", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?"])


def longer(inner):
    pieces = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        pieces.map("".join),
        st.builds("({}){}".format, inner, REPEATS),
        pieces.map(lambda texts: f"(?:{'|'.join(texts)})"),
    )


EXPRESSIONS = st.recursive(st.builds("{}{}".format, ATOMS, REPEATS), longer, max_leaves=8)


@given(EXPRESSIONS)
def test_an_example_matches_its_expression(expression):
    example = example_of(expression)
    assert example is not None
    assert re.fullmatch(expression, example, re.DOTALL)


@given(EXPRESSIONS)
def test_no_shorter_text_of_two_characters_or_less_matches(expression):
    example = example_of(expression)
    alphabet = ["a", "f", "o", "0", "é", "]", "[", "x", "A", " ", "."]
    shorter = ["", *alphabet, *(one + two for one in alphabet for two in alphabet)]
    assert not any(len(text) < len(example) and re.fullmatch(expression, text) for text in shorter)


@pytest.mark.parametrize(
    "expression", ["(?=a)b", "a)", "(a", r"\p{L}", "(a{1000}){1000}", "(" * 80 + ")" * 80, "[[:alpha:]]"]
)
def test_what_is_not_read_gives_no_example_instead_of_a_wrong_one(expression):
    assert example_of(expression) is None


@pytest.mark.parametrize(
    "expression", [".*foo", "[a-z]*z", ".*foo.*bar", "(.*x.*){5}", r"(?s:.*)end\.", "[0-9]*7{3}q?"]
)
def test_a_literal_behind_a_wildcard_is_taken(expression):
    grammar = Grammar(GrammarKind.REGEX, expression)
    lib = library()
    lib.check(grammar, 40)
    assert re.fullmatch(expression, lib._verdict(grammar).ending.text.decode())


def test_hints_come_from_every_kind_of_grammar():
    assert hints_of(Grammar(GrammarKind.REGEX, "a{3}|b")) == (b"b",)
    assert hints_of(Grammar(GrammarKind.CHOICE, '["yes","no"]')) == (b"no", b"yes")
    assert hints_of(Grammar(GrammarKind.GRAMMAR, 'start: "x" /[0-9]{2}/')) == (b"x", b"00")
    source = '{"items":{"pattern":"^\\"a$","format":"ipv4"},"patternProperties":{"^k":{}}}'
    assert hints_of(Grammar(GrammarKind.JSON, source)) == (b"k", b'\\"a', b"1.1.1.1")
