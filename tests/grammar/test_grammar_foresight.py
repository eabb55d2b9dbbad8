"""What a form makes likely to come next: guesses that do not change answers, and endings kept without a search."""

from __future__ import annotations

import json
import random

import pytest
from grammar_harness import END, VOCABULARY, allowed, library, schema

from penstock.contract.grammar import Grammar, GrammarKind

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "id": {"type": "integer"}, "true": {"type": "boolean"}},
    "required": ["name", "id", "true"],
    "additionalProperties": False,
}
PEOPLE = schema(json.dumps({"type": "array", "items": PERSON, "minItems": 9, "maxItems": 9}))
FORMS = [
    PEOPLE,
    Grammar(GrammarKind.REGEX, r"value: (true|false), [0-9]{2} (name|null)!"),
    schema('{"enum": ["ab", "ac"]}'),
]


@pytest.fixture(scope="module")
def lib():
    return library()


def ids(lib, *texts: str) -> tuple[int, ...]:
    by_bytes = {token: id_ for id_, token in reversed(list(enumerate(VOCABULARY.tokens)))}
    return tuple(by_bytes[text.encode()] for text in texts)


def written(matcher, tokens) -> None:
    for token in tokens:
        matcher.mask()
        assert matcher.take(token)


def text(tokens) -> str:
    return b"".join(VOCABULARY.tokens[id_] for id_ in tokens).decode()


def test_names_and_marks_are_foreseen_and_values_are_not(lib):
    matcher = lib.matcher(PEOPLE, 900)
    assert text(matcher.foresee(16)) == '[{"name":"'
    written(matcher, ids(lib, "[{", '"', "name", '": ', '"', "E", "r"))
    assert matcher.foresee(16) == ()
    written(matcher, ids(lib, '", "'))
    assert text(matcher.foresee(16)) == 'id":'
    written(matcher, ids(lib, "id", '": '))
    assert matcher.foresee(16) == ()


def test_what_came_at_such_a_place_before_comes_again(lib):
    matcher, record = lib.matcher(PEOPLE, 900), ("name", '":', " ", '"', "E", '",', '"', "id", '":', " ", "4", ",")
    written(matcher, ids(lib, "[", '{"', *record))
    assert text(matcher.foresee(1)) == ' "'.strip(), "as behind the comma before"
    written(matcher, ids(lib, '"', "true", '":', " ", "true", "}", ",", '{"', "name"))
    assert matcher.foresee(1) == ids(lib, '":')


def test_no_more_is_foreseen_than_is_asked_for_or_fits(lib):
    matcher = lib.matcher(PEOPLE, 900)
    whole = matcher.foresee(16)
    assert [matcher.foresee(most) for most in range(len(whole))] == [whole[:most] for most in range(len(whole))]


def test_where_no_token_is_to_spare_the_known_ending_is_foreseen(lib):
    room = len(lib.check(PEOPLE, 900).ending) + 1
    matcher, taken = lib.matcher(PEOPLE, room), []
    while coming := matcher.foresee(7):
        written(matcher, coming)
        taken += coming
    assert len(taken) == room - 1
    assert allowed(matcher.mask()) == [END]
    assert len(json.loads(text(taken))) == 9


@pytest.mark.parametrize("form", FORMS, ids=["json", "regex", "enum"])
def test_foreseeing_changes_nothing_and_what_is_foreseen_may_come(lib, form):
    rng, foreseen = random.Random(4), 0
    for _ in range(10):
        asked, other, token = lib.matcher(form, 400), lib.matcher(form, 400), -1
        for _ in range(300):
            coming = asked.foresee(8)
            foreseen += len(coming)
            assert END not in coming
            assert asked._matcher.validate_tokens(list(coming)) == len(coming)
            assert (asked.mask(), asked.closing()) == (other.mask(), other.closing())
            token = coming[0] if coming and rng.random() < 0.7 else rng.choice(allowed(asked.mask()))
            assert asked.take(token) == other.take(token)
            if token == END:
                break
    assert foreseen > 0


def test_an_ending_is_kept_without_a_search_while_a_model_writes_json(lib):
    """With spaces that the known ending lacks, and strings that grow in front of a long ending."""
    matcher = lib.matcher(PEOPLE, 900)
    record = (
        ' "',
        "name",
        '": ',
        '"',
        "E",
        "Street",
        '",',
        ' "',
        "id",
        '":',
        " ",
        "1",
        "0",
        ",",
        ' "',
        "true",
        '":',
        " true",
        "}",
    )
    tokens = [*ids(lib, "["), *ids(lib, *"{", *record_tokens(record))]
    assert [matcher.take_at_once(token) for token in tokens] == [True] * len(tokens)


def record_tokens(record) -> list[str]:
    """The record's parts; a part that the vocabulary has no token for comes as single characters."""
    known = {token.decode() for token in VOCABULARY.tokens if token and token[0] < 128}
    return [each for part in record for each in ([part] if part in known else part)]
