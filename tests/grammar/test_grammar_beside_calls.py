"""An answer that may call tools, and has a form where it does not: whatever is written is one of the two."""

from __future__ import annotations

import json

import jsonschema
import pytest
from grammar_harness import library, schema, written

from penstock.api_fields.tools import ToolOffer, make_tool, schema_beside_calls
from penstock.contract.grammar import JSON_OBJECT
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ReplyRules, ToolUse, made_calls
from penstock.text.reply import ReplyFormat

CITY = {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1}}, "required": ["id"]}
TOOLS = {"one": CITY | {"additionalProperties": False}, "two": {"type": "object", "properties": {}}}
FORMS = {
    "any object": {"type": "object"},
    "a record": {
        "type": "object",
        "properties": {"name": {"enum": ["one", "street"]}, "value": {"type": "boolean"}},
        "required": ["name", "value"],
        "additionalProperties": False,
    },
    "a call's twin": {
        "type": "object",
        "properties": {"name": {"const": "one"}, "arguments": {"type": "object"}},
        "required": ["name", "arguments"],
    },
}


def taken_apart(offer, answer):
    """The text and the calls of an answer, parsed byte by byte and whole."""
    rules = ReplyRules(tool_use=ToolUse.AUTO, parallel_tool_calls=offer.parallel, form=JSON_OBJECT)
    reader = ReplyFormat().reader(ChatPrompt((Message("user", "Hi"),), tools=offer.tools), rules, "")
    results = []
    for pieces in ([answer], answer):
        parser = reader.parser("id")
        found = [parser.push(piece) for piece in pieces] + [parser.finish()]
        calls = made_calls(call for piece in found for call in piece.calls)
        results.append(("".join(piece.text for piece in found), [(each.name, each.arguments) for each in calls]))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_answer_calls_a_tool_as_its_schema_says_or_has_the_form(name, parallel):
    tools = tuple(
        make_tool({"name": tool, "parameters": parameters}, "", DEFAULT_LIMITS) for tool, parameters in TOOLS.items()
    )
    offer, form = ToolOffer(tools, ToolUse.AUTO, parallel=parallel), FORMS[name]
    lib, grammar = library(), schema(json.dumps(schema_beside_calls(form, offer)))
    lib.check(grammar, 60)
    ways = set()
    for seed in range(40):
        answer, _ = written(lib, grammar, 30 + seed, seed)
        text, calls = taken_apart(offer, answer.decode())
        ways.add(bool(calls))
        if calls:
            assert not text.strip()
            assert parallel or len(calls) == 1
            for called, arguments in calls:
                jsonschema.validate(json.loads(arguments), TOOLS[called])
        else:
            jsonschema.validate(json.loads(text), form)
    assert ways == {True, False}
