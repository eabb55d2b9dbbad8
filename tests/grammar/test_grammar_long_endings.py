"""An ending of thousands of tokens is mended where it was broken: what was begun last is closed, and the rest kept."""

from __future__ import annotations

import json

import pytest
from grammar_harness import END, VOCABULARY, library, schema

from penstock.grammar.vocabulary import Speller

NAMES = [f"p{number}" for number in range(200)]
MOST = 60
"""How many endings may be checked for one token; before, it was each of a document's thousand marks."""


def document(of: dict[str, object]) -> str:
    return json.dumps(
        {"type": "object", "properties": dict.fromkeys(NAMES, of), "required": NAMES, "additionalProperties": False}
    )


@pytest.mark.parametrize(
    ("of", "value"),
    [
        ({"type": "object", "properties": {"q": {"type": "number"}}}, '{"q":10.5,"z": {"a":["b",{"c":1}]}, "":true}'),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, "[1, 20,-3 ,400]"),
        ({"type": "string", "format": "uri"}, '"http://a.b/c?d=e"'),
        ({"enum": ["one", 20, None, {"a": [1]}]}, '{"a":[1]}'),
    ],
    ids=["objects", "arrays", "uris", "choices"],
)
def test_a_token_of_a_long_document_needs_few_checks(monkeypatch, of, value):
    checks, completes = [0], Speller.completes

    def counted(self, matcher, ids):
        checks[0] += 1
        return completes(self, matcher, ids)

    matcher = library().matcher(schema(document(of)), 8000)
    monkeypatch.setattr(Speller, "completes", counted)
    written = "{" + ", ".join(f'"{name}":{value}' for name in NAMES[:3]) + f',"{NAMES[3]}":'
    most = 0
    for byte in written.encode():
        checks[0] = 0
        assert matcher.take(byte), bytes([byte])
        most = max(most, checks[0])
    assert most <= MOST


def test_what_it_mends_completes_the_document():
    of = {"type": "object", "properties": {"q": {"type": "number"}, "r": {"type": "number"}}}
    matcher = library().matcher(schema(document(of)), 8000)
    begun = b'{"p0":{"q":1,"other": [2, {"th'
    for byte in begun:
        assert matcher.take(byte)
    text = bytearray(begun)
    while (token := matcher.closing()) != END:
        assert matcher.take(token)
        text += VOCABULARY.tokens[token]
    whole = json.loads(text)
    assert list(whole) == NAMES
    assert whole["p0"]["q"] == 1
    assert list(whole["p0"]["other"][1]) == ["th"]
