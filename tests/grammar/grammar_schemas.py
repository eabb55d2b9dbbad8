"""Three hundred JSON schemas of growing difficulty, the same every time."""

from __future__ import annotations

import random
from typing import Any

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
RECURSIVE: list[dict[str, Any]] = [
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
    },
    {
        "$ref": "#/definitions/list",
        "definitions": {
            "list": {
                "anyOf": [
                    {"type": "null"},
                    {
                        "type": "object",
                        "properties": {"head": {"type": "string"}, "tail": {"$ref": "#/definitions/list"}},
                        "required": ["head", "tail"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
    },
]


def schemas(count: int = 300) -> list[dict[str, Any]]:
    """The first are single values; the later ones nest up to five deep."""
    rng = random.Random(20260)
    plain = [*LEAVES, *RECURSIVE]
    return [*plain, *(_nested(rng, 1 + 4 * index // count) for index in range(count - len(plain)))]


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
