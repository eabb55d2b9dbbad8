"""The schema that an answer must match where `tool_choice` makes it call, or where it may call or have a form."""

from __future__ import annotations

import jsonschema_rs
import pytest

from penstock.api_fields.tools import enforced_schema, read_tools, schema_beside_calls
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import DEFAULT_LIMITS

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
TREE = {
    "type": "object",
    "$defs": {"leaf": {"type": "integer"}},
    "properties": {
        "value": {"$ref": "#/$defs/leaf"},
        "next": {"$ref": "#"},
        "fixed": {"const": {"$ref": "#"}},
    },
    "additionalProperties": False,
}


def schema_for(**given):
    tools = [WEATHER, {"type": "function", "function": {"name": "tree", "parameters": TREE}}]
    schema = enforced_schema(read_tools({"tools": tools} | given, DEFAULT_LIMITS))
    return jsonschema_rs.validator_for(schema)


def test_the_enforced_schema_of_a_required_call():
    validator = schema_for(tool_choice="required")
    weather = {"name": "weather", "arguments": {"city": "Rome"}}
    tree = {"name": "tree", "arguments": {"value": 1, "next": {"value": 2, "fixed": {"$ref": "#"}}}}
    for right in ([weather], [tree], [tree, weather, tree]):
        assert validator.is_valid(right)
    for wrong in (
        [],
        weather,
        [{"name": "weather", "arguments": {}}],
        [{"name": "later", "arguments": {}}],
        [{"name": "weather"}],
        [{"name": "tree", "arguments": {"next": {"value": "x"}}}],
        [{"name": "tree", "arguments": {"city": "Rome"}}],
        [weather | {"id": 1}],
    ):
        assert not validator.is_valid(wrong), wrong
    single = schema_for(tool_choice="required", parallel_tool_calls=False)
    assert single.is_valid([tree])
    assert not single.is_valid([tree, tree])


def test_the_enforced_schema_of_a_named_call_is_its_parameters():
    validator = schema_for(tool_choice={"type": "function", "function": {"name": "tree"}})
    assert validator.is_valid({"value": 1, "next": {"next": {}}})
    assert not validator.is_valid({"next": {"value": "x"}})
    assert not validator.is_valid([])


NODE = {"$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["next"]}}}


def beside(form, **given):
    offer = read_tools(
        {"tools": [WEATHER, {"type": "function", "function": {"name": "tree", "parameters": TREE}}]} | given,
        DEFAULT_LIMITS,
    )
    return jsonschema_rs.validator_for(schema_beside_calls(form, offer))


def test_an_answer_beside_calls_has_its_form_or_calls():
    form = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    weather = {"name": "weather", "arguments": {"city": "Rome"}}
    tree = {"name": "tree", "arguments": {"next": {"value": 2}}}
    for validator in (beside(form), beside({"$defs": {"x": form}, "$ref": "#/$defs/x"})):
        for right in ({"ok": True}, weather, tree, [weather], [tree, weather]):
            assert validator.is_valid(right), right
        wrong = ({"ok": 1}, {}, [], [{"ok": True}], weather | {"ok": True}, {"name": "weather", "arguments": {}})
        for each in (*wrong, [weather, {"ok": True}], "text", 5):
            assert not validator.is_valid(each), each
    assert not beside(form, parallel_tool_calls=False).is_valid([tree, tree])
    assert beside({"type": "object"}).is_valid({"any": ["thing"]})
    nodes = beside(NODE | {"$ref": "#/$defs/Node"})
    assert not nodes.is_valid({"next": {}})


@pytest.mark.parametrize(
    "form",
    [
        {"type": "array"},
        {},
        True,
        {"anyOf": [{"type": "object"}]},
        {"type": ["object", "null"]},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/gone"},
        {"$ref": 5},
    ],
)
def test_a_form_that_lists_of_calls_could_not_be_told_from_is_refused(form):
    with pytest.raises(InvalidParameter, match="must be of type 'object'") as refused:
        beside(form)
    assert refused.value.param == "tools"
