"""Checks a call's arguments against its tool's JSON Schema, with a bound on the cost of a check.

jsonschema-rs validates (drafts 4 to 2020-12, regular expressions without backtracking). This module decides that only
references inside the schema are followed, and that arguments do not fit if checking them would cost too much: a schema
that refers to one part in several ways can take time exponential in its size or in the depth of the arguments.
Does not know how calls are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jsonschema_rs

from penstock.contract.errors import InvalidParameter
from penstock.contract.tools import Tool

__all__ = ["ToolSchemas"]

_MOST_VISITS = 200_000
_MOST_PAIRS = 20_000
_MOST_SUBSCHEMAS = 2_000
_MOST_PATTERNS = 200
_MOST_PATTERN_BYTES = 2**18  # compiled; takes well under a millisecond
_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_PLACE = ("not", "if", "then", "else")
_EVERY_MEMBER = ("additionalProperties", "unevaluatedProperties")
_EVERY_ITEM = ("items", "additionalItems", "contains", "unevaluatedItems")
_FOREIGN = ("$dynamicRef", "$recursiveRef", "$id", "id", "$anchor", "$dynamicAnchor")


class ToolSchemas:
    """The tools of one request. Immutable, safe to use from any thread.

    Raises:
        InvalidParameter: a schema is invalid, has an unsupported keyword or refers outside itself, or the tools have
            too many subschemas or patterns; names `tools.<index>.function.parameters`.
    """

    __slots__ = ("_schemas", "_strict", "tools")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)
        self._schemas: dict[str, tuple[Any, Any]] = {}
        self._strict = frozenset(tool.name for tool in tools if tool.strict)
        subschemas = patterns = 0
        for index, tool in enumerate(tools):
            schema, param = json.loads(tool.parameters), f"tools.{index}.function.parameters"
            for node in _schemas_in(schema):
                subschemas += 1
                patterns += _patterns_of(node)
                if subschemas > _MOST_SUBSCHEMAS or patterns > _MOST_PATTERNS:
                    most = f"{_MOST_SUBSCHEMAS} subschemas and {_MOST_PATTERNS} patterns"
                    raise InvalidParameter(param, f"{param}: the tools together may have at most {most}.")
                _refuse_foreign(node, schema, param)
            self._schemas[tool.name] = (schema, _compile(schema, param))

    def knows(self, name: str) -> bool:
        """Whether there is such a tool."""
        return name in self._schemas

    def takes_any(self, name: str) -> bool:
        """Whether there is such a tool and it accepts any arguments, because it is not strict."""
        return name in self._schemas and name not in self._strict

    def takes_text(self, name: str, parameter: str) -> bool:
        """Whether the tool's schema declares this parameter as a string."""
        if name not in self._schemas:
            return False
        schema = self._schemas[name][0]
        members = schema.get("properties") if isinstance(schema, dict) else None
        found = members.get(parameter) if isinstance(members, dict) else None
        return isinstance(found, dict) and found.get("type") == "string"

    def accepts(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether arguments make a call: a strict tool's must fit its schema, any other tool takes all."""
        return self.takes_any(name) or self.fits(name, arguments)

    def fits(self, name: str, arguments: dict[str, Any]) -> bool:
        """Whether there is such a tool and the arguments fit its schema."""
        if name not in self._schemas:
            return False
        schema, validator = self._schemas[name]
        return _affordable(schema, arguments) and bool(validator.is_valid(arguments))


def _patterns_of(schema: dict[str, Any]) -> int:
    members = schema.get("patternProperties")
    return ("pattern" in schema) + (len(members) if isinstance(members, dict) else 0)


def _affordable(schema: Any, arguments: dict[str, Any]) -> bool:
    try:
        return _Cost(schema).visits(schema, arguments) <= _MOST_VISITS
    except RecursionError:  # a chain of hundreds of references
        return False


def _compile(schema: Any, param: str) -> Any:
    try:
        options = jsonschema_rs.RegexOptions(size_limit=_MOST_PATTERN_BYTES)
        return jsonschema_rs.validator_for(schema, pattern_options=options, retriever=_refuse_retrieval)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        # Give the place, not the library's message, which repeats what the caller wrote.
        place = ".".join(str(step)[:64] for step in (param, *getattr(error, "instance_path", ())))
        message = (
            f"{param} is not a JSON Schema, or has a pattern that is too large or needs backtracking; see {place}."
        )
        raise InvalidParameter(param, message) from None


def _refuse_retrieval(uri: str) -> NoReturn:
    raise ValueError(f"nothing is fetched from {uri}")


def _refuse_foreign(node: dict[str, Any], root: Any, param: str) -> None:
    """Refuse references other than `#` and `#/...`, so that `_Cost` and the library follow the same references."""
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise InvalidParameter(param, f"{param}: a $ref must be # or begin with #/.")
    if not isinstance(_resolve(root, reference), dict | bool):
        raise InvalidParameter(param, f"{param}: a $ref leads nowhere.")
    for name in _FOREIGN:
        if isinstance(node.get(name), str):
            raise InvalidParameter(param, f"{param}: the keyword {name} is not supported.")


def _schemas_in(root: Any) -> Iterator[dict[str, Any]]:
    """Every subschema, without the values of `enum` and similar keywords."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"):
                waiting += value.values() if isinstance(value, dict) else []
            elif key not in ("enum", "const", "default", "examples"):
                waiting += value if isinstance(value, list) else [value]


def _resolve(root: Any, reference: str) -> Any:
    """Resolve a fragment's JSON Pointer (RFC 6901); None if it leads nowhere."""
    node = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


class _Cost:
    """Counts the subschema visits of a check that caches nothing, while itself visiting each pair only once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[int, int], int] = {}

    def visits(self, schema: Any, value: Any) -> int:
        """The count, or some number above the limit if counting was cut short."""
        if not isinstance(schema, dict):
            return 1
        key = (id(schema), id(value))
        if key in self._known:
            return self._known[key]
        if len(self._known) >= _MOST_PAIRS:
            return _MOST_VISITS + 1
        self._known[key] = 0  # a pair met again below is a circular reference, which the library cuts
        total = 1 + len(schema.get("enum", ()))
        for part, of in _parts(self._root, schema, value):
            total += self.visits(part, of)
            if total > _MOST_VISITS:
                break
        self._known[key] = total
        return total


def _parts(root: Any, schema: dict[str, Any], value: Any) -> Iterator[tuple[Any, Any]]:
    """The subschemas that apply next, each with the value that it applies to."""
    if "$ref" in schema:
        yield _resolve(root, schema["$ref"]), value
    for key in _LISTS:
        yield from ((part, value) for part in schema.get(key, ()))
    for key in _SAME_PLACE:
        if key in schema:
            yield schema[key], value
    for key in ("dependentSchemas", "dependencies"):
        yield from ((part, value) for part in schema.get(key, {}).values())
    if isinstance(value, dict):
        yield from _parts_of_object(schema, value)
    elif isinstance(value, list):
        yield from _parts_of_list(schema, value)


def _parts_of_object(schema: dict[str, Any], value: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    properties = schema.get("properties", {})
    yield from ((properties[name], member) for name, member in value.items() if name in properties)
    everywhere = [schema[key] for key in _EVERY_MEMBER if key in schema]
    everywhere += schema.get("patternProperties", {}).values()
    yield from ((part, member) for part in everywhere for member in value.values())
    if "propertyNames" in schema:
        yield from ((schema["propertyNames"], name) for name in value)


def _parts_of_list(schema: dict[str, Any], value: list[Any]) -> Iterator[tuple[Any, Any]]:
    for key in _EVERY_ITEM:
        part = schema.get(key)
        if isinstance(part, list):  # drafts before 2020-12: one schema per position
            yield from zip(part, value, strict=False)
        elif part is not None:
            yield from ((part, item) for item in value)
    yield from zip(schema.get("prefixItems", ()), value, strict=False)
