"""The scan agrees with `json.loads` on what is an object or list, and knows at once what cannot become one."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text.json_scan import JsonScan, ScanState

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
CONTAINERS = VALUES.filter(lambda value: isinstance(value, list | dict))
ALMOST = st.text(alphabet='{}[]:,"\\ \n0123.eE+-tfnrualsx/', max_size=14)


class NotJson(Exception):
    """A constant that Python reads and JSON lacks."""


def no_constant(name: str) -> None:
    raise NotJson(name)


def run(text: str) -> tuple[ScanState, int]:
    scanner = JsonScan()
    at = scanner.take(text, 0)
    return scanner.state, at


@given(CONTAINERS, st.booleans(), st.sampled_from([None, 1]))
def test_every_json_value_is_taken_to_its_end_and_no_further(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert run(text + ' {"more": 1}') == (ScanState.DONE, len(text))
    for cut in range(len(text)):
        assert run(text[:cut]) == (ScanState.OPEN, cut)


@settings(max_examples=400)
@given(st.sampled_from(["{", "[", '{"', "[1", '{"a":']), ALMOST)
@example("[", "01]")
@example("[", "-]")
@example("[", "1.]")
@example("[", "1e5,.5]")
@example("[", '"\\u12g4"]')
@example("[", '"\t"]')
@example("{", '"a":1,}')
@example("[", "NaN]")
def test_what_is_done_is_json_and_what_is_broken_is_not(head, tail):
    text = head + tail
    state, at = run(text)
    if state is ScanState.DONE:
        json.loads(text[:at])
    else:
        with pytest.raises((json.JSONDecodeError, NotJson)):
            json.loads(text, parse_constant=no_constant)


@given(ALMOST, st.data())
def test_the_cut_into_pieces_changes_nothing(tail, data):
    text = '{"a' + tail
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    scanner, taken = JsonScan(), 0
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if scanner.state is ScanState.OPEN:
            taken += scanner.take(text[start:end], 0)
    assert (scanner.state, taken) == run(text)


def test_the_first_impossible_character_breaks_it():
    for text, at in [
        ("{'a'", 1),
        ("{a", 1),
        ('{"a" 1', 5),
        ("[1 2", 3),
        ('{"a":tru}', 8),
        ("x", 0),
        ('"s"', 0),
        ("[}", 1),
    ]:
        assert run(text) == (ScanState.BROKEN, at), text


def test_nesting_is_bounded():
    assert run("[" * 64)[0] is ScanState.OPEN
    assert run("[" * 65)[0] is ScanState.BROKEN


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (r'["\ud800"', 8),
        (r'["\ud800x', 8),
        (r'["\ud800\n', 9),
        (r'["\ud800\u0041', 13),
        (r'["\ud800\ud800', 13),
        (r'["\udc00', 7),
        ("[" + "1" * 1_001, 1_001),
    ],
)
def test_half_a_pair_and_an_endless_number_break_a_value_that_python_would_take(text, at):
    assert run(text) == (ScanState.BROKEN, at)
    scanner = JsonScan()
    for character in text:
        scanner.take(character, 0)
    assert scanner.state is ScanState.BROKEN


def test_whole_pairs_and_long_numbers_are_taken():
    for text in (r'["\ud83d\ude00\uD83D\uDE00x"]', "[" + "1" * 1_000 + "]"):
        assert run(text) == (ScanState.DONE, len(text))
