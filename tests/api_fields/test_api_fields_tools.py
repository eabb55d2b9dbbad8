"""The schema that an answer must match where `tool_choice` makes it call."""

from __future__ import annotations

import jsonschema_rs

from penstock.api_fields.tools import enforced_schema, read_tools
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
