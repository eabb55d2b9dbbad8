"""Three hundred JSON schemas of growing difficulty, no two of the same form; the same every time."""

from __future__ import annotations

import json
import random
from typing import Any

from grammar_records import RECORDS

LEAVES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "minLength": 2, "maxLength": 12},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(north|south|east|west)$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "ipv4"},
    {"type": "integer", "minimum": 18, "maximum": 120},
    {"type": "integer", "minimum": -5},
    {"type": "integer", "multipleOf": 5},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "exclusiveMinimum": -10, "maximum": 10.5},
    {"enum": ["red", "green", "blue", 7, None, True]},
    {"const": {"fixed": [1, "two"]}},
    {"type": ["string", "null"]},
    {"type": ["integer", "boolean"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 8}]},
    {"oneOf": [{"type": "boolean"}, {"type": "string", "minLength": 1}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
]
NAMES = ["id", "name", "value", "tags", "größe", "first name", "a", 'b"c', "x/y"]


def schemas(count: int = 300) -> list[dict[str, Any]]:
    """The first are single values, then come records; the last are built at random and nest up to five deep.

    No two have the same form: they differ in more than names, numbers, texts and the order of their keywords.
    """
    rng, made = random.Random(20260), {form(schema): schema for schema in (*LEAVES, *RECORDS)}
    while len(made) < count:
        schema = _nested(rng, 1 + 4 * len(made) // count)
        made.setdefault(form(schema), schema)
    return list(made.values())


def form(schema: Any) -> str:
    """What is left of a schema without its names, numbers and texts: its keywords, types, formats and nesting."""
    return json.dumps(_form(schema), sort_keys=True)


def _form(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else None
    return {keyword: _form_of(keyword, value) for keyword, value in schema.items()}


def _form_of(keyword: str, value: Any) -> Any:
    match keyword, value:
        case (("type" | "format"), _):
            return value
        case "pattern", _:
            return "".join(sorted({character for character in value if not character.isalnum()}))
        case (("properties" | "patternProperties" | "$defs" | "definitions"), dict()):
            return sorted(json.dumps(_form(inner), sort_keys=True) for inner in value.values())
        case (("anyOf" | "oneOf" | "allOf" | "prefixItems"), list()):
            return [_form(inner) for inner in value]
        case (("enum" | "required"), list()):
            return sorted(type(entry).__name__ for entry in value)
        case (("items" | "additionalProperties"), _):
            return _form(value)
    return type(value).__name__


def _nested(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return rng.choice(LEAVES)
    return rng.choice([_object, _object, _array, _tuple, _map, _choice])(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    made = {
        "type": "object",
        "properties": {name: _nested(rng, rng.randint(0, depth - 1)) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    return made | ({"additionalProperties": False} if rng.random() < 0.7 else {})


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    made = {"type": "array", "items": _nested(rng, depth - 1), "minItems": least}
    return made | ({"maxItems": least + rng.randint(0, 3)} if rng.random() < 0.5 else {})


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    first = [_nested(rng, depth - 1), rng.choice(LEAVES)]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": _nested(rng, depth - 1), "minProperties": rng.randint(0, 1)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False}
    one = closed | {"properties": {"kind": {"const": "one"}, "body": _nested(rng, depth - 1)}, "required": ["kind"]}
    two = closed | {"properties": {"kind": {"const": "two"}, "size": {"type": "integer"}}, "required": ["kind", "size"]}
    return {"anyOf": [one, two]}
