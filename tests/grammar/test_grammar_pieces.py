"""The pieces of which documents are made: each against Python's own judgement of the same texts."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from itertools import product

import pytest
from grammar_harness import VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
from test_grammar_example import EXPRESSIONS

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.fewest.expression import Expression, Unreadable
from penstock.grammar.fewest.lexemes import Matching, Quoted, Unlike
from penstock.grammar.fewest.numerals import Bound, Number
from penstock.grammar.fewest.reading import parts_of
from penstock.grammar.fewest.search import TooFar, search_parts
from penstock.grammar.token_trie import TokenTrie

TEXTS = st.text(alphabet='afo0é]["\\ .zA\n\x7f\u2028😀', max_size=6)


def accepts(lexeme, text: bytes) -> bool:
    state = lexeme.start
    for byte in text:
        if byte not in lexeme.candidates(state):
            assert lexeme.after(state, byte) is None
        state = lexeme.after(state, byte)
        if state is None:
            return False
    return lexeme.accepts(state)


@given(EXPRESSIONS, TEXTS, st.booleans(), st.booleans())
def test_an_expression_matches_what_pythons_own_matches(expression, text, at_start, at_end):
    anchored = ("^" if at_start else "") + f"(?:{expression})" + (r"\Z" if at_end else "")
    ours = anchored.replace(r"\Z", "$")
    assert Expression(ours, anywhere=True).matches(text) == bool(re.search(anchored, text, re.ASCII))
    assert Expression(ours, anywhere=False).matches(text) == bool(re.fullmatch(anchored, text, re.ASCII))


@pytest.mark.parametrize(
    "expression",
    [
        "(?=a)b",
        "a)",
        "(a",
        r"\P{L}",
        r"\p{Greek}",
        "[[:alpha:]]",
        "a**",
        "(a{1000}){1000}",
        r"\bx",
        "[z-a]",
        "*",
        "[",
        "(" * 100 + ")" * 100,
    ],
)
def test_what_is_not_read_is_said_to_be_so(expression):
    with pytest.raises(Unreadable):
        Expression(expression, anywhere=True)


@given(TEXTS, EXPRESSIONS, st.integers(0, 3), st.integers(0, 3) | st.none())
def test_a_string_is_read_as_json_reads_it(text, expression, least, more):
    most = None if more is None else least + more
    conditions = [Expression(expression, anywhere=True), Unlike(["foo", "a", ""], [Expression("^0", anywhere=True)])]
    fits = least <= len(text) <= (len(text) if most is None else most)
    fits = fits and bool(re.search(expression, text, re.ASCII)) and text not in ("foo", "a", "") and text[:1] != "0"
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode()
    assert accepts(Quoted(conditions, least, most), written) == fits
    assert accepts(Matching(conditions, least, most), text.encode()) == fits


@given(
    st.binary(max_size=6)
    | st.lists(st.sampled_from([b"\\u00", b"\\", b"1f", b"7F", b"\xe2\x80\xa8", b"a"])).map(b"".join)
)
def test_what_is_taken_for_a_string_is_one(inner):
    if accepts(Quoted(), b'"' + inner + b'"'):
        assert isinstance(json.loads(b'"' + inner + b'"'), str)


RANGES = [
    ([], None, False),
    ([], None, True),
    ([Bound(Decimal("-5"), True, False)], None, True),
    ([Bound(Decimal(0), True, False), Bound(Decimal(1), False, True)], None, False),
    ([Bound(Decimal("-10"), True, True), Bound(Decimal("10.5"), False, False)], None, False),
    ([Bound(Decimal("-0.5"), False, False)], None, False),
    ([Bound(Decimal("0.05"), True, True), Bound(Decimal("0.21"), False, True)], None, False),
    ([Bound(Decimal(12), True, True)], Decimal(5), True),
    ([], Decimal("0.25"), False),
    ([Bound(Decimal(100), False, True)], Decimal("1.5"), False),
]


@pytest.mark.parametrize(("bounds", "step", "whole"), RANGES)
def test_a_number_is_in_its_range_by_value(bounds, step, whole):
    number, forms = Number(bounds, step, whole), re.compile(r"-?(0|[1-9]\d*)" + ("" if whole else r"(\.\d+)?"))
    for size in range(1, 6):
        for characters in product("-0125.", repeat=size):
            text = "".join(characters)
            fits = forms.fullmatch(text) is not None
            if fits:
                value = Decimal(text)
                fits = all(_holds(bound, value) for bound in bounds) and (step is None or value % step == 0)
                fits = fits and not (bounds and value == 0 and text[0] == "-")
                if step is not None and fits:  # a number with more decimals than its step has zeros there
                    fits = accepts(number, text.rstrip("0").rstrip(".").encode() if "." in text else text.encode())
            assert accepts(number, text.encode()) == fits, text


def _holds(bound: Bound, value: Decimal) -> bool:
    if value == bound.value:
        return not bound.is_open
    return (value > bound.value) == bound.upward


def test_powers_of_ten_are_numbers_where_nothing_bounds_them():
    for text in (b"1e5", b"-0.50E+12", b"0e-1"):
        assert accepts(Number(), text)
        assert not accepts(Number(whole=True), text)
        assert not accepts(Number([Bound(Decimal(9), False, False)]), text)
    for text in (b"1e", b"1e+", b"e5", b"01e5"):
        assert not accepts(Number(), text)


def test_a_trie_holds_each_text_once_under_its_lowest_id():
    trie = TokenTrie([b"", b"ab", b"a", b"abc", b"b", b"a"])
    found, path = {}, bytearray()
    for node in range(1, len(trie.byte)):
        path[trie.depth[node] - 1 :] = bytes([trie.byte[node]])
        if trie.token[node] >= 0:
            found[bytes(path)] = trie.token[node]
        assert trie.end[node] > node
    assert found == {b"a": 2, b"ab": 1, b"abc": 3, b"b": 4}
    assert trie.longest == 3


def tokens_of(kind: GrammarKind, source: str, most: int = 100) -> tuple[int, ...] | None:
    return search_parts(parts_of(Grammar(kind, source)), TokenTrie(VOCABULARY.tokens), most)


def test_a_document_with_no_fewer_tokens_than_one_that_is_known_is_none():
    assert len(tokens_of(GrammarKind.CHOICE, '["nothing","idid"]', 3)) == 2
    assert tokens_of(GrammarKind.CHOICE, '["nothing","idid"]', 2) is None
    assert tokens_of(GrammarKind.JSON, "false") is None


def test_lark_is_not_read():
    with pytest.raises(Unreadable):
        tokens_of(GrammarKind.GRAMMAR, 'start: "a"')


def test_a_search_that_would_take_too_long_says_so(monkeypatch):
    monkeypatch.setattr("penstock.grammar.fewest.search._MOST_STEPS", 2_000)
    assert len(tokens_of(GrammarKind.JSON, '{"type":"boolean"}')) == 1
    with pytest.raises(TooFar):
        tokens_of(GrammarKind.JSON, '{"type":"string","minLength":100}')
