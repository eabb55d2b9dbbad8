"""`response_format` and `structured_outputs` over HTTP: what reaches the engine, and what is refused by which name."""

from __future__ import annotations

import pytest

from penstock.contract.grammar import Grammar, GrammarKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMPACT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


def named(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON, '{"type":"object"}')),
        ({"response_format": named(SCHEMA)}, Grammar(GrammarKind.JSON, COMPACT)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON, COMPACT)),
        ({"structured_outputs": {"json": COMPACT}}, Grammar(GrammarKind.JSON, COMPACT)),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar(GrammarKind.CHOICE, '["\\u00e9","b"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.GRAMMAR, 'start: "a"')),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_form_reaches_the_engine_as_a_grammar(served, endpoint, fields, grammar):
    response = getattr(served, endpoint)(**fields)
    assert response.status_code == 200, response.text
    assert served.request.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "text", "mode": 1}}, "response_format.mode"),
        ({"response_format": named("x")}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1001}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_malformed_form_is_refused_by_its_name(served, endpoint, fields, param):
    response = getattr(served, endpoint)(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
