"""`tools` and `tool_choice` of a request: what the model may call, must call, and which JSON a forced call is.

Decides OpenAI's shapes of both, for every endpoint that takes tools, and the JSON Schema that an answer is held to when
a call is required (`enforced_schema`). Knows neither templates nor how models write calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.tools import CallPiece, Tool, ToolUse
from penstock.server.fields import BOOLEAN, OBJECT, TEXT, Field, Kind, Neutrals, join_path, read_fields
from penstock.server.strict_json import JsonObject

__all__ = ["TOOLS", "TOOL_CHOICE", "ToolOffer", "call_objects", "enforced_schema", "piece_object", "read_tools"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")

_FUNCTION_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]+$", "maxLength": 64},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION_SCHEMA},
    "required": ["type", "function"],
    "additionalProperties": False,
}
TOOLS = Kind("a list of tools", {"type": "array", "items": _TOOL_SCHEMA}, lambda value: isinstance(value, list))
TOOL_CHOICE = Kind(
    "a string or an object",
    {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]},
    lambda value: isinstance(value, str | dict),
)

_TOOL_FIELDS = (Field("type", TEXT, "Always function."), Field("function", OBJECT, "The function."))
_FUNCTION_FIELDS = (
    Field("name", TEXT, "Letters, digits, dots, dashes and underscores."),
    Field("description", TEXT, "What it is for."),
    Field("parameters", OBJECT, "JSON Schema of the arguments; none by default."),
    Field("strict", BOOLEAN, "Calls fit the schema either way: what does not is no call."),
)
_CHOICE_FIELDS = (
    Field("type", TEXT, "function or allowed_tools."),
    Field("function", OBJECT, "The function that must be called."),
    Field("allowed_tools", OBJECT, "Which tools may be called."),
)
_ALLOWED_FIELDS = (Field("mode", TEXT, "auto or required."), Field("tools", TOOLS, "Those that may be called."))
_NOTHING: Neutrals = {}


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools that the model is shown and may call, and whether it must.

    Attributes:
        name: the tool that it must call; "" unless `use` is `NAMED`.
    """

    tools: tuple[Tool, ...] = ()
    use: ToolUse = ToolUse.NONE
    name: str = ""
    parallel: bool = True


def read_tools(given: JsonObject, limits: RequestLimits) -> ToolOffer:
    """What `tools`, `tool_choice` and `parallel_tool_calls` come to.

    With `none` the model is not shown the tools at all, which is the one sure way to have it call none.

    Raises:
        InvalidParameter: a tool is malformed, or the choice names none of the tools.
    """
    values: list[Any] = given.get("tools", [])
    if len(values) > limits.max_tools:
        raise InvalidParameter("tools", f"tools may hold at most {limits.max_tools} tools.")
    tools = tuple(_tool(value, f"tools.{index}", limits) for index, value in enumerate(values))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools.{index}.function.name"
            raise InvalidParameter(where, f"{where}: another tool has this name already.")
    offer = _chosen(tools, given.get("tool_choice", "auto"))
    if offer.use is ToolUse.NONE:
        return ToolOffer()
    return ToolOffer(offer.tools, offer.use, offer.name, given.get("parallel_tool_calls", True))


def _tool(value: Any, path: str, limits: RequestLimits) -> Tool:
    given = _object(value, _TOOL_FIELDS, path, required=("type", "function"))
    if given["type"] != "function":
        where = f"{path}.type"
        message = f"{where}: only tools of type 'function' are supported."
        raise InvalidParameter(where, message, code="unsupported_parameter")
    where = f"{path}.function"
    function = _object(given["function"], _FUNCTION_FIELDS, where, required=("name",))
    name: str = function["name"]
    if not _NAME.fullmatch(name) or len(name) > limits.max_tool_name_chars:
        raise InvalidParameter(
            f"{where}.name",
            f"{where}.name must have 1 to {limits.max_tool_name_chars} letters, digits, dots, dashes and underscores.",
        )
    parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
    definition = {"type": "function", "function": function}
    return Tool(name, json.dumps(definition, ensure_ascii=False), json.dumps(parameters, ensure_ascii=False))


def _chosen(tools: tuple[Tool, ...], choice: str | JsonObject) -> ToolOffer:
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidParameter("tool_choice", "tool_choice must be none, auto, required or an object.")
        if choice == "required" and not tools:
            raise InvalidParameter("tool_choice", "tool_choice is required, but there are no tools.")
        return ToolOffer(tools, ToolUse(choice if tools else "none"))
    given = _object(choice, _CHOICE_FIELDS, "tool_choice", required=("type",))
    match given["type"]:
        case "function" if "allowed_tools" not in given:
            name = _named(given, "tool_choice", tools)
            return ToolOffer(tools, ToolUse.NAMED, name)
        case "allowed_tools" if "function" not in given:
            return _allowed(given, tools)
    message = "tool_choice.type must be function or allowed_tools, and what it names be given."
    raise InvalidParameter("tool_choice.type", message)


def _allowed(given: JsonObject, tools: tuple[Tool, ...]) -> ToolOffer:
    path = "tool_choice.allowed_tools"
    rules = _object(given.get("allowed_tools"), _ALLOWED_FIELDS, path, required=("mode", "tools"))
    if rules["mode"] not in ("auto", "required"):
        raise InvalidParameter(f"{path}.mode", f"{path}.mode must be auto or required.")
    names = set()
    for index, value in enumerate(rules["tools"]):
        where = f"{path}.tools.{index}"
        names.add(_named(_object(value, _TOOL_FIELDS, where, required=("type",)), where, tools))
    allowed = tuple(tool for tool in tools if tool.name in names)
    if not allowed:
        raise InvalidParameter(f"{path}.tools", f"{path}.tools must name at least one tool.")
    return ToolOffer(allowed, ToolUse(rules["mode"]))


def _named(given: JsonObject, path: str, tools: Sequence[Tool]) -> str:
    where = f"{path}.function"
    function = _object(given.get("function"), (Field("name", TEXT, ""),), where, required=("name",))
    name: str = function["name"]
    if all(tool.name != name for tool in tools):
        raise InvalidParameter(f"{where}.name", f"{where}.name: there is no tool of this name.")
    return name


def _object(value: Any, fields: Sequence[Field], path: str, *, required: Iterable[str]) -> JsonObject:
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    given = read_fields(value, fields, _NOTHING, path)
    for name in required:
        if name not in given:
            where = join_path(path, name)
            raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    return given


def enforced_schema(offer: ToolOffer) -> JsonObject:
    """The JSON Schema of an answer that must call, which the model is held to while it generates.

    A named tool's answer is its arguments; otherwise it is a list of `{"name", "arguments"}`, one at least.
    """
    definitions = {f"tool_{i}": _moved(json.loads(tool.parameters), f"tool_{i}") for i, tool in enumerate(offer.tools)}
    places = {tool.name: f"#/$defs/tool_{index}" for index, tool in enumerate(offer.tools)}
    if offer.use is ToolUse.NAMED:
        return {"$ref": places[offer.name], "$defs": definitions}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    limit = {} if offer.parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": definitions}


def _moved(schema: Any, name: str) -> Any:
    """A schema that has become a definition: its references to itself go to the new place."""
    if isinstance(schema, list):
        return [_moved(item, name) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{name}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in ("enum", "const", "default", "examples")
        else _moved(value, name)
        for key, value in schema.items()
    }


def piece_object(piece: CallPiece) -> JsonObject:
    """A piece of a call as a stream's delta has it."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def call_objects(pieces: Iterable[CallPiece]) -> list[JsonObject]:
    """Whole calls, made of all their pieces."""
    calls: dict[int, JsonObject] = {}
    for piece in pieces:
        if piece.id:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return [calls[index] for index in sorted(calls)]
