"""Several JSON schemas that all hold for one value, merged keyword by keyword. Knows no references and no unions."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from penstock.grammar.fewest.expression import Unreadable
from penstock.grammar.fewest.numerals import Bound, Number

__all__ = ["Schemas", "constants", "largest", "number_of", "smallest", "type_of", "types"]

Schemas = tuple[Any, ...]
"""JSON schemas that all hold for the same value."""

TYPES = ("null", "boolean", "number", "string", "array", "object")


def largest(schemas: Schemas, keyword: str) -> int:
    """The largest value of a keyword; 0 if no schema has it."""
    return max((schema[keyword] for schema in schemas if keyword in schema), default=0)


def smallest(schemas: Schemas, keyword: str) -> int | None:
    """The smallest value of a keyword; None if no schema has it."""
    return min((schema[keyword] for schema in schemas if keyword in schema), default=None)


def types(schemas: Schemas) -> tuple[str, ...]:
    """The types that all the schemas allow."""
    types = set(TYPES) | {"integer"}
    for given in (schema["type"] for schema in schemas if "type" in schema):
        allowed = {given} if isinstance(given, str) else set(given)
        types &= allowed | {"integer"} if "number" in allowed else allowed
    if "number" in types:
        types -= {"integer"}
    return tuple(kind for kind in (*TYPES, "integer") if kind in types)


def type_of(value: Any) -> str:
    """The type of a JSON value: "integer" if it is written as one, "number" for 1.0."""
    names = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object", int: "integer"}
    return names.get(type(value), "number")


def constants(schemas: Schemas) -> list[Any]:
    """The values that every `enum` and `const` allows; at least one schema must have one."""
    lists = [schema["enum"] for schema in schemas if "enum" in schema]
    lists += [[schema["const"]] for schema in schemas if "const" in schema]
    texts = [{json.dumps(value, sort_keys=True) for value in values} for values in lists]
    return [value for value in lists[0] if all(json.dumps(value, sort_keys=True) in those for those in texts)]


def number_of(schemas: Schemas, whole: bool) -> Number:
    """A number within all bounds. Raises `Unreadable` if the schemas have different values of `multipleOf`."""
    bounds = [
        Bound(
            Decimal(str(schema[keyword])), keyword in ("minimum", "exclusiveMinimum"), keyword.startswith("exclusive")
        )
        for schema in schemas
        for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        if keyword in schema
    ]
    steps = {Decimal(str(schema["multipleOf"])) for schema in schemas if "multipleOf" in schema}
    if len(steps) > 1:
        raise Unreadable("multipleOf")
    return Number(bounds, next(iter(steps), None), whole)
