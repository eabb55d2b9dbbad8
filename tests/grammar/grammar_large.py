"""Large schemas: many properties, deep records, long lists of words; the same every time."""

from __future__ import annotations

import random
from typing import Any

from grammar_schemas import LEAVES

Schema = dict[str, Any]

_SYLLABLES = ["al", "be", "cor", "din", "es", "fa", "gra", "hol", "in", "jor", "ka", "lum", "mo", "ner", "o", "pli"]
_SEPARATORS = ["", "_", "-", " "]


def large_schemas(count: int = 24) -> list[Schema]:
    """Objects of 20 to 60 members, nested three deep."""
    rng = random.Random(71)
    return [_record(rng, rng.randint(20, 60), 3, rng.choice((0.1, 0.4, 0.9))) for _ in range(count)]


def _record(rng: random.Random, members: int, depth: int, required: float) -> Schema:
    names = _words(rng, members)
    made = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < required],
    }
    return made | ({"additionalProperties": False} if rng.random() < 0.7 else {})


def _value(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if depth > 0 and kind < 0.08:
        return _record(rng, rng.randint(2, 8), depth, 0.5)
    if depth > 0 and kind < 0.16:
        least = rng.randint(0, 3)
        return {"type": "array", "items": _record(rng, rng.randint(1, 4), depth, 0.7), "minItems": least}
    if kind < 0.24:
        return {"enum": _words(rng, 50)}
    if kind < 0.30:
        options = [_record(rng, 2, 1, 1.0) for _ in range(2)] if depth > 0 else rng.sample(LEAVES[:5], 2)
        return {"anyOf": [*options, {"type": "null"}]}
    return rng.choice(LEAVES)


def _words(rng: random.Random, count: int) -> list[str]:
    """`count` different words."""
    words: dict[str, None] = {}
    while len(words) < count:
        pieces = [rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 4))]
        words[rng.choice(_SEPARATORS).join(pieces)] = None
    return list(words)
