"""JSON schemas at admission: supported keywords and caps, checked before anything is compiled.

An unsupported keyword that restricts documents is refused by name, because ignoring it would give a looser grammar than
requested. Keywords are those of JSON Schema 2020-12 and draft 7.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.contract.errors import InvalidParameter

__all__ = ["ANNOTATIONS", "MAX_DEPTH", "MAX_ENUM", "SUPPORTED", "read_schema"]

MAX_DEPTH = 32
"""Levels of schemas inside schemas."""
MAX_ENUM = 1000

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
    | {"$id", "contentEncoding", "contentMediaType", "discriminator"}
)
"""Keywords that restrict nothing."""

SUPPORTED = frozenset(
    {"type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "$defs", "definitions"}
    | {"properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"}
    | {"prefixItems", "items", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_MAPS = frozenset({"$defs", "definitions", "properties", "patternProperties"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE = frozenset({"additionalProperties", "items"})
_FIELD = "structured_outputs"


def read_schema(source: str) -> dict[str, Any]:
    """The schema in `source`, checked.

    Raises:
        InvalidParameter: it is not a schema, is too deep, or has an unsupported keyword; says where.
    """
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(_FIELD, f"the JSON schema is not readable: {error}") from error
    _check(schema, "schema", 0)
    return schema if isinstance(schema, dict) else {}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _check(schema: Any, path: str, depth: int) -> None:
    if schema is True:
        return
    if depth > MAX_DEPTH:
        raise InvalidParameter(_FIELD, f"the JSON schema is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(schema, dict):
        raise InvalidParameter(_FIELD, f"{path} must be an object or true: it is a JSON schema")
    _check_count(schema, path)
    for keyword, value in schema.items():
        where = f"{path}.{keyword}"
        _check_keyword(keyword, value, where)
        for name, inner in _inner(keyword, value, where):
            _check(inner, name, depth + 1)


def _check_count(schema: dict[str, Any], path: str) -> None:
    """Refuse `minProperties` above 1 where names may repeat: JSON can name a property twice, and a reader keeps one."""
    least = schema.get("minProperties", 0)
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if isinstance(least, int) and least > 1 and not closed:
        message = f"the JSON schema keyword 'minProperties' (at {path[:200]}) is supported above 1 only for the names"
        message += " in properties, with additionalProperties: false"
        raise InvalidParameter(_FIELD, message, code="unsupported_parameter")


def _check_keyword(keyword: str, value: Any, where: str) -> None:
    if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
        return
    if keyword not in SUPPORTED:
        message = f"the JSON schema keyword {keyword!r} (at {where[:200]}) is not supported"
        raise InvalidParameter(_FIELD, message, code="unsupported_parameter")
    if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        raise InvalidParameter(_FIELD, f"{where[:200]} must point inside the schema: it must begin with '#'")
    if keyword == "enum" and (not isinstance(value, list) or not 1 <= len(value) <= MAX_ENUM):
        raise InvalidParameter(_FIELD, f"{where[:200]} must be a list of 1 to {MAX_ENUM} values")


def _inner(keyword: str, value: Any, where: str) -> list[tuple[str, Any]]:
    """The schemas inside a keyword, each with its path. `false` is left out: there is nothing in it to check."""
    if keyword in _MAPS:
        if not isinstance(value, dict):
            raise InvalidParameter(_FIELD, f"{where[:200]} must be an object of JSON schemas")
        return [(f"{where}.{name}", inner) for name, inner in value.items() if inner is not False]
    if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise InvalidParameter(_FIELD, f"{where[:200]} must be a list of JSON schemas")
        return [(f"{where}.{index}", inner) for index, inner in enumerate(value) if inner is not False]
    return [(where, value)] if keyword in _SINGLE and value is not False else []
