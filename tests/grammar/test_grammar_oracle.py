"""A request is refused only if no document fits: limits found at admission, against an independent oracle."""

from __future__ import annotations

import json
import random

import pytest
from grammar_fewest import Trie, fewest
from grammar_harness import END, VOCABULARY, allowed, library, schema
from grammar_large import large_schemas
from grammar_oracle import Documents
from grammar_schemas import schemas
from test_grammar_shortest import fewest as fewest_by_trying
from test_grammar_shortest import found

from penstock.contract.errors import InvalidParameter
from penstock.grammar.compiling import compile_grammar

SCHEMAS = schemas()
TRIE = Trie(VOCABULARY.tokens)


@pytest.fixture(scope="module")
def lib():
    return library()


def fewest_found(lib, one: dict, trie: Trie = TRIE) -> int:
    """Tokens of the shortest document with its end: the oracle allows no fewer, and llguidance takes that many."""
    ids = fewest(Documents(one), trie, lib._ready().tokens)
    assert lib._ready().completes(compile_grammar(schema(json.dumps(one)), lib._ready()), ids), one
    return len(ids) + 1


def at_random(lib, one: dict, seed: int, most: int = 60) -> bytes | None:
    """A document that llguidance takes, of tokens picked at random; None if it does not end within `most` tokens."""
    rng, matcher = random.Random(seed), compile_grammar(schema(json.dumps(one)), lib._ready())
    text = b""
    for _ in range(most):
        choices = allowed(matcher.compute_bitmask())
        token = END if END in choices and rng.random() < 0.5 else rng.choice(choices)
        if token == END:
            return text
        matcher.consume_token(token)
        text += VOCABULARY.tokens[token]
    return None


def assert_the_fewest_tokens_are_found(lib, asked: list[dict], trie: Trie = TRIE) -> None:
    for one in asked:
        grammar, least = schema(json.dumps(one)), fewest_found(lib, one, trie)
        assert found(lib, grammar) == least, one
        lib.check(grammar, least)
        with pytest.raises(InvalidParameter):
            lib.check(grammar, least - 1)


def assert_the_oracle_takes_what_is_written(lib, indices, seeds: int) -> int:
    written = 0
    for index in indices:
        documents = Documents(SCHEMAS[index])
        for seed in range(seeds):
            text = at_random(lib, SCHEMAS[index], seed)
            assert text is None or documents.accepts(text), (SCHEMAS[index], text)
            written += text is not None
    return written


def test_the_oracle_agrees_with_trying_everything(lib):
    small = [index for index in range(0, 100, 3) if fewest_by_trying(lib, schema(json.dumps(SCHEMAS[index])), 1_000)]
    assert len(small) >= 8
    for index in small:
        tried = fewest_by_trying(lib, schema(json.dumps(SCHEMAS[index])), 1_000)
        assert fewest_found(lib, SCHEMAS[index]) == tried, SCHEMAS[index]


def test_the_oracle_leaves_out_no_document(lib):
    assert assert_the_oracle_takes_what_is_written(lib, range(0, len(SCHEMAS), 6), seeds=2) >= 40


def test_the_fewest_tokens_are_found(lib):
    assert_the_fewest_tokens_are_found(lib, SCHEMAS[4::10])


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_the_fewest_tokens_of_all_schemas_is_found(lib, part):
    assert_the_fewest_tokens_are_found(lib, SCHEMAS[part::10])


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_the_oracle_leaves_out_no_document_of_any_schema(lib, part):
    assert assert_the_oracle_takes_what_is_written(lib, range(part, len(SCHEMAS), 10), seeds=20) >= 200


@pytest.mark.deep
@pytest.mark.parametrize("part", range(8))
def test_the_fewest_tokens_of_large_schemas_is_found(lib, part):
    assert_the_fewest_tokens_are_found(lib, large_schemas()[part::8])
