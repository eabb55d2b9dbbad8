"""Three hundred schemas, a writer that picks at random among all allowed tokens, and an independent judge."""

from __future__ import annotations

import datetime
import json
import re

import jsonschema
import pytest
from grammar_harness import library, schema, written
from grammar_schemas import form, schemas

from penstock.contract.errors import InvalidParameter

SCHEMAS = schemas()
CHECKED = jsonschema.Draft202012Validator
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "uuid"])


def is_date(text) -> bool:
    """RFC 3339 has a year 0, a leap year; Python has none."""
    return datetime.date.fromisoformat(text.replace("0000-", "2000-", 1)) is not None


def is_time(text) -> bool:
    """RFC 3339 allows leap seconds, small letters and any number of decimals; Python does not."""
    pattern = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
    return re.fullmatch(pattern, text) is not None


def is_date_time(text) -> bool:
    return is_date(text[:10]) and text[10] in "Tt " and is_time(text[11:])


FORMATS.checkers = FORMATS.checkers | {
    "date": (lambda text: not isinstance(text, str) or is_date(text), ValueError),
    "time": (lambda text: not isinstance(text, str) or is_time(text), ()),
    "date-time": (lambda text: not isinstance(text, str) or is_date_time(text), ValueError),
}


@pytest.fixture(scope="module")
def lib():
    return library()


def need_of(lib, grammar, tight: bool) -> int:
    """Tokens of the document that admission finds at once; if `tight`, of the shortest that it finds."""
    return len(lib._verdict(grammar, tight).ending.ids) + 1


def assert_documents_are_valid(lib, indices, tight: bool) -> None:
    for index in indices:
        grammar = schema(json.dumps(SCHEMAS[index]))
        need = need_of(lib, grammar, tight)
        lib.check(grammar, need)
        judge = CHECKED(SCHEMAS[index], format_checker=FORMATS)
        for seed, limit in enumerate((need, need + 2, need + 25)):
            text, tokens = written(lib, grammar, limit, seed)
            assert tokens <= limit, (SCHEMAS[index], text)
            judge.validate(json.loads(text))


def test_there_are_three_hundred_and_no_two_of_one_form():
    assert len({form(one) for one in SCHEMAS}) == len(SCHEMAS) == 300


def test_every_document_is_valid_and_ends_in_time(lib):
    assert_documents_are_valid(lib, range(len(SCHEMAS)), tight=False)


def test_documents_of_the_fewest_tokens_are_valid(lib):
    assert_documents_are_valid(lib, range(0, len(SCHEMAS), 10), tight=True)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_all_documents_of_the_fewest_tokens_are_valid(lib, part):
    assert_documents_are_valid(lib, range(part, len(SCHEMAS), 10), tight=True)


def test_a_limit_that_no_document_fits_is_refused_with_the_numbers(lib):
    for one in SCHEMAS[::10]:
        grammar = schema(json.dumps(one))
        need = need_of(lib, grammar, tight=True)
        with pytest.raises(InvalidParameter, match=f"takes {need} tokens.* only {need - 1} may") as refused:
            lib.check(grammar, need - 1)
        assert refused.value.param == "max_tokens"
