"""`tools` and `tool_choice` of a request: what the model may call, and what it must call.

Reads the format of OpenAI's chat completions. Every endpoint's tools and choice become a `ToolOffer`; an answer that
must be a call, or must have a given form unless it is a call, is constrained by a JSON Schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api_fields.fields import BOOLEAN, OBJECT, TEXT, Field, Kind, read_object
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.tools import Tool, ToolUse

__all__ = [
    "NAME_SCHEMA",
    "TOOLS",
    "TOOL_CHOICE",
    "ToolChoice",
    "ToolOffer",
    "check_tools",
    "chosen_word",
    "enforced_schema",
    "known_name",
    "make_tool",
    "read_tools",
    "schema_beside_calls",
]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
NAME_SCHEMA = {"type": "string", "pattern": "^[A-Za-z0-9_.-]+$", "maxLength": 64}

_FUNCTION_SCHEMA = {
    "type": "object",
    "properties": {
        "name": NAME_SCHEMA,
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
    Field("description", TEXT, "What the function is for."),
    Field("parameters", OBJECT, "JSON Schema of the arguments; none by default."),
    Field(
        "strict",
        BOOLEAN,
        "true: a call is sent whole, and only if its arguments fit the schema. Otherwise they are sent as written.",
    ),
)
_CHOICE_FIELDS = (
    Field("type", TEXT, "function or allowed_tools."),
    Field("function", OBJECT, "The function that must be called."),
    Field("allowed_tools", OBJECT, "Which tools may be called."),
)
_ALLOWED_FIELDS = (Field("mode", TEXT, "auto or required."), Field("tools", TOOLS, "The tools that may be called."))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call a tool, and which.

    Attributes:
        name: the tool that the model must call; "" unless `use` is `NAMED`.
        allowed: names of the tools that the model may call; empty for all.
    """

    use: ToolUse
    name: str = ""
    allowed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools that the model is shown and may call, and whether it must call one.

    Attributes:
        name: the tool that it must call; "" unless `use` is `NAMED`.
        schema_fields: for each tool, the request field that holds its parameters' schema, for errors.
    """

    tools: tuple[Tool, ...] = ()
    use: ToolUse = ToolUse.NONE
    name: str = ""
    parallel: bool = True
    schema_fields: tuple[str, ...] = ()

    @classmethod
    def made(cls, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, schema_field: str) -> ToolOffer:
        """Make the offer from a request's tools and its choice among them.

        With `NONE` the model is not shown the tools at all: nothing else reliably keeps it from calling them.

        Args:
            tools: all tools, in the request's order.
            choice: which of them may or must be called.
            parallel: whether one answer may hold several calls.
            schema_field: path of a tool's parameters within the tool.
        """
        if choice.use is ToolUse.NONE:
            return cls()
        kept = [(index, tool) for index, tool in enumerate(tools) if not choice.allowed or tool.name in choice.allowed]
        fields = tuple(f"tools.{index}.{schema_field}" for index, _ in kept)
        return cls(tuple(tool for _, tool in kept), choice.use, choice.name, parallel, fields)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.use in (ToolUse.REQUIRED, ToolUse.NAMED)

    @property
    def aliases(self) -> dict[str, str]:
        """The engine's field names -> the caller's, for errors: schemas; `structured_outputs` if a call is forced."""
        schemas = {f"tools.{index}.function.parameters": field for index, field in enumerate(self.schema_fields)}
        return schemas | ({"structured_outputs": "tools"} if self.forced else {})


def read_tools(given: JsonObject, limits: RequestLimits) -> ToolOffer:
    """The offer in the `tools`, `tool_choice` and `parallel_tool_calls` of chat completions.

    Raises:
        InvalidParameter: a tool is malformed, or the choice names an unknown tool.
    """
    values: list[Any] = given.get("tools", [])
    tools = [_tool(value, f"tools.{index}", limits) for index, value in enumerate(values)]
    check_tools(tools, "function.name", limits)
    choice = _chosen(tools, given.get("tool_choice", "auto"))
    parallel = given.get("parallel_tool_calls", True)
    return ToolOffer.made(tools, choice, parallel=parallel, schema_field="function.parameters")


def check_tools(tools: Sequence[Tool], name_field: str, limits: RequestLimits) -> None:
    """Refuse too many tools, and duplicate names; `name_field` is the path of a tool's name within the tool."""
    if len(tools) > limits.max_tools:
        raise InvalidParameter("tools", f"tools may hold at most {limits.max_tools} tools.")
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools.{index}.{name_field}"
            raise InvalidParameter(where, f"{where}: another tool has this name already.")


def make_tool(function: JsonObject, path: str, limits: RequestLimits) -> Tool:
    """Make a tool of a function in OpenAI's format (`name`, and optionally `description`, `parameters`, `strict`).

    Raises:
        InvalidParameter: its name is malformed; names the field below `path`.
    """
    name: str = function["name"]
    if not _NAME.fullmatch(name) or len(name) > limits.max_tool_name_chars:
        raise InvalidParameter(
            f"{path}.name",
            f"{path}.name must have 1 to {limits.max_tool_name_chars} letters, digits, dots, dashes and underscores.",
        )
    function = {"parameters": {"type": "object", "properties": {}}} | function
    ordered = {key: function[key] for key in ("name", "description", "parameters", "strict") if key in function}
    definition = {"type": "function", "function": ordered}
    parameters = json.dumps(function["parameters"], ensure_ascii=False)
    return Tool(name, json.dumps(definition, ensure_ascii=False), parameters, bool(function.get("strict")))


def _tool(value: Any, path: str, limits: RequestLimits) -> Tool:
    given = read_object(value, _TOOL_FIELDS, path, "type", "function")
    if given["type"] != "function":
        where = f"{path}.type"
        message = f"{where}: only tools of type 'function' are supported."
        raise InvalidParameter(where, message, code="unsupported_parameter")
    where = f"{path}.function"
    return make_tool(read_object(given["function"], _FUNCTION_FIELDS, where, "name"), where, limits)


def chosen_word(word: str, tools: Sequence[Tool]) -> ToolChoice:
    """The choice that a single word expresses: none, auto or required.

    Raises:
        InvalidParameter: the word is unknown, or a call is required but there are no tools.
    """
    if word not in ("none", "auto", "required"):
        raise InvalidParameter("tool_choice", "tool_choice must be none, auto, required or an object.")
    if word == "required" and not tools:
        raise InvalidParameter("tool_choice", "tool_choice is required, but there are no tools.")
    return ToolChoice(ToolUse(word if tools else "none"))


def known_name(name: str, path: str, tools: Sequence[Tool]) -> str:
    """`name`, checked to be the name of a tool.

    Raises:
        InvalidParameter: there is no such tool; names the field `path`.
    """
    if all(tool.name != name for tool in tools):
        raise InvalidParameter(path, f"{path}: there is no tool of this name.")
    return name


def _chosen(tools: Sequence[Tool], choice: str | JsonObject) -> ToolChoice:
    if isinstance(choice, str):
        return chosen_word(choice, tools)
    given = read_object(choice, _CHOICE_FIELDS, "tool_choice", "type")
    match given["type"]:
        case "function" if "allowed_tools" not in given:
            return ToolChoice(ToolUse.NAMED, _named(given, "tool_choice", tools))
        case "allowed_tools" if "function" not in given:
            return _allowed(given, tools)
    message = "tool_choice.type must be function or allowed_tools, and what it names be given."
    raise InvalidParameter("tool_choice.type", message)


def _allowed(given: JsonObject, tools: Sequence[Tool]) -> ToolChoice:
    path = "tool_choice.allowed_tools"
    rules = read_object(given.get("allowed_tools"), _ALLOWED_FIELDS, path, "mode", "tools")
    if rules["mode"] not in ("auto", "required"):
        raise InvalidParameter(f"{path}.mode", f"{path}.mode must be auto or required.")
    names = set()
    for index, value in enumerate(rules["tools"]):
        where = f"{path}.tools.{index}"
        names.add(_named(read_object(value, _TOOL_FIELDS, where, "type"), where, tools))
    if not names:
        raise InvalidParameter(f"{path}.tools", f"{path}.tools must name at least one tool.")
    return ToolChoice(ToolUse(rules["mode"]), allowed=frozenset(names))


def _named(given: JsonObject, path: str, tools: Sequence[Tool]) -> str:
    where = f"{path}.function"
    function = read_object(given.get("function"), (Field("name", TEXT, ""),), where, "name")
    return known_name(function["name"], f"{where}.name", tools)


def enforced_schema(offer: ToolOffer) -> JsonObject:
    """The JSON Schema of an answer that must be a call.

    For a named tool the answer is its arguments; otherwise it is a non-empty list of `{"name", "arguments"}`.
    """
    definitions, places = _placed(offer)
    if offer.use is ToolUse.NAMED:
        return {"$ref": places[offer.name], "$defs": definitions}
    return _calls(offer, places) | {"$defs": definitions}


def schema_beside_calls(form: JsonObject, offer: ToolOffer) -> JsonObject:
    """The JSON Schema of an answer that has a given form or is a call: one `{"name", "arguments"}`, or a list of them.

    Raises:
        InvalidParameter: the form may be something other than an object, and so be confused with a list of calls.
    """
    if not _is_object(form):
        message = "tools may be called here, so the answer's own schema must be of type 'object'."
        raise InvalidParameter("tools", message, code="unsupported_value")
    definitions, places = _placed(offer)
    definitions["form"] = _moved(form, "form")
    calls = _calls(offer, places)
    return {"anyOf": [{"$ref": "#/$defs/form"}, *calls["items"]["anyOf"], calls], "$defs": definitions}


def _placed(offer: ToolOffer) -> tuple[JsonObject, dict[str, str]]:
    """The tools' schemas as definitions, and a reference to each by the tool's name."""
    definitions = {f"tool_{i}": _moved(json.loads(tool.parameters), f"tool_{i}") for i, tool in enumerate(offer.tools)}
    return definitions, {tool.name: f"#/$defs/tool_{index}" for index, tool in enumerate(offer.tools)}


def _calls(offer: ToolOffer, places: Mapping[str, str]) -> JsonObject:
    """The schema of a list of calls."""
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
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def _is_object(schema: Any) -> bool:
    """Whether the schema's type is `object`; follows references within the schema."""
    root, seen = schema, set()
    while isinstance(schema, dict) and "type" not in schema:
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/") or reference in seen:
            return False
        seen.add(reference)
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return isinstance(schema, dict) and schema["type"] == "object"


def _moved(schema: Any, name: str) -> Any:
    """A schema moved to `$defs`, with its internal references adjusted."""
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
