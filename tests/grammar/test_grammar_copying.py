"""A value that was begun goes on as in the prompt: from which place, how far, and how it ends."""

from __future__ import annotations

import json
import random

import pytest
from grammar_harness import END, VOCABULARY, allowed, library, schema

from penstock.grammar.copying import Copying, value_in

TEXT = "Anna Miller, 34, lives in Bad Ems. Her brother Tom Miller is 38 and lives in Ems. Maria Rossi (41) is a nurse."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "id": {"type": "integer"}},
    "required": ["name", "id"],
    "additionalProperties": False,
}
PEOPLE = schema(json.dumps({"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}))


@pytest.mark.parametrize(
    ("tail", "inside", "value"),
    [
        (b'{"name": "Anna Mil', True, b"Anna Mil"),
        (b'{"name": "', True, b""),
        (b'"age": 3', False, b"3"),
        (b'"age": 3.5', False, b"3.5"),
        (b'"age": 34,', False, b""),
        (b"", False, b""),
        (b"a string whose beginning is long ago", True, b"hose beginning is long ago"[-24:]),
    ],
)
def test_the_value_at_the_end_is_what_was_begun(tail, inside, value):
    assert value_in(tail, inside) == value


@pytest.mark.parametrize(
    ("value", "more"),
    [
        ("A", "nna"),
        ("Anna", " Miller"),
        ("Anna Miller", ""),
        ("To", "m"),
        ("Tom Miller", ""),  # "is" begins with no capital
        ("Ba", "d"),
        ("Bad", " Ems"),
        ("Bad Ems", ""),
        ("lives", " in"),
        ("3", "4"),
        ("34", ""),
        ("4", "1"),
        ("ill", None),  # begins no word
        ("Peter", None),
    ],
)
def test_what_follows_is_a_word_at_most(value, more):
    found = Copying(TEXT.encode()).ahead(value.encode())
    assert found == (None if more is None else more.encode())


def test_a_later_place_comes_first_once_an_earlier_one_was_copied():
    copying = Copying(TEXT.encode())
    assert copying.ahead(b"3") == b"4"
    copying.wrote(b'{"name":"Tom Miller', True, b'",', 7)
    assert copying.ahead(b"3") == b"8"
    assert copying.ahead(b"Anna") == b" Miller", "and then those before it"
    assert copying.closing(inside=True) == 7
    assert copying.closing(inside=False) is None
    other = copying.copy()
    other.wrote(b'"id":38', False, b"}", 9)
    assert (other.closing(inside=False), copying.closing(inside=False)) == (9, None)


def test_an_empty_prompt_has_nothing_to_copy():
    copying = Copying(b"")
    copying.wrote(b'{"name":"Tom', True, b'",', 7)
    assert copying.ahead(b"Tom") is None


def ids(text: str) -> list[int]:
    """A token for each byte."""
    return [*text.encode()]


def test_a_record_is_foreseen_from_its_first_letters():
    matcher = library().matcher(PEOPLE, 900, ids(TEXT))
    for token in ids('[{"name":"Anna Miller","id":34},{"name":"T'):
        matcher.mask()
        assert matcher.take(token)
    coming = b"".join(VOCABULARY.tokens[id_] for id_ in matcher.foresee(24)).decode()
    assert coming.startswith('om Miller","id"'), coming
    for token in ids('om Miller","id":3'):
        matcher.mask()
        assert matcher.take(token)
    assert b"".join(VOCABULARY.tokens[id_] for id_ in matcher.foresee(2)).decode() == "8}"


def test_what_the_form_does_not_allow_is_not_foreseen():
    form = schema('{"enum": ["Anna Rossi", "Anna Maria"]}')
    matcher = library().matcher(form, 100, ids(TEXT))
    for token in ids('"Anna '):
        assert matcher.take(token)
    assert matcher.foresee(8) == ()


def test_a_prompt_changes_guesses_and_nothing_else():
    rng, with_prompt = random.Random(5), library()
    for _ in range(5):
        asked, other, token = with_prompt.matcher(PEOPLE, 300, ids(TEXT)), with_prompt.matcher(PEOPLE, 300), -1
        while token != END:
            coming = asked.foresee(8)
            assert asked._matcher.validate_tokens(list(coming)) == len(coming)
            assert (asked.mask(), asked.closing()) == (other.mask(), other.closing())
            token = coming[0] if coming and rng.random() < 0.7 else rng.choice(allowed(asked.mask()))
            assert asked.take(token) == other.take(token)
