"""Parse `tools` and `tool_choice` of `/v1/responses`, in OpenAI's flat form, and repeat them in the response.

Tools that OpenAI's own service runs (search, code, MCP) are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.api_fields.fields import BOOLEAN, OBJECT, TEXT, Field, Kind, Neutrals, read_object
from penstock.api_fields.strict_json import JsonObject
from penstock.api_fields.tools import (
    NAME_SCHEMA,
    TOOL_CHOICE,
    ToolChoice,
    ToolOffer,
    check_tools,
    chosen_word,
    known_name,
    make_tool,
)
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.tools import Tool, ToolUse

__all__ = ["RESPONSE_TOOL_FIELDS", "read_response_tools", "repeated_tools"]

_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "name": NAME_SCHEMA,
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type", "name"],
    "additionalProperties": False,
}
LIST = Kind("a list of tools", {"type": "array", "items": _TOOL_SCHEMA}, lambda value: isinstance(value, list))
RESPONSE_TOOL_FIELDS = (
    Field("tools", LIST, "Functions that the model may call."),
    Field(
        "tool_choice",
        TOOL_CHOICE,
        "none: no tool is shown. auto: the model decides. required, or a function: it must call. allowed_tools: which.",
    ),
    Field("parallel_tool_calls", BOOLEAN, "Whether one answer may hold several calls; if not, it ends with the first."),
)

_TYPE = Field("type", TEXT, "Always function.")
_NAME = Field("name", TEXT, "Letters, digits, dots, dashes and underscores.")
_TOOL_FIELDS = (
    _TYPE,
    _NAME,
    Field("description", TEXT, "What it is for."),
    Field("parameters", OBJECT, "JSON Schema of the arguments; none by default."),
    Field(
        "strict",
        BOOLEAN,
        "true: only arguments that fit the schema make a call, and it comes whole. Else they come as written.",
    ),
)
_NEUTRAL_TOOL: Neutrals = {"allowed_callers": (["direct"],), "defer_loading": (False,), "output_schema": ()}
_CHOICE_FIELDS = (
    Field("type", TEXT, "function or allowed_tools."),
    Field("name", TEXT, "The function that must be called."),
    Field("mode", TEXT, "auto or required, of allowed_tools."),
    Field("tools", LIST, "Those that may be called, of allowed_tools."),
)


def read_response_tools(given: JsonObject, limits: RequestLimits) -> ToolOffer:
    """Parse `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidParameter: a tool is malformed, or the choice names an unknown tool.
    """
    values: list[Any] = given.get("tools", [])
    tools = [_tool(value, f"tools.{index}", limits) for index, value in enumerate(values)]
    check_tools(tools, "name", limits)
    choice = _choice(given.get("tool_choice", "auto"), tools)
    parallel = given.get("parallel_tool_calls", True)
    return ToolOffer.made(tools, choice, parallel=parallel, schema_field="parameters")


def repeated_tools(given: JsonObject) -> JsonObject:
    """The tool fields as the response repeats them, with defaults filled in: a tool is not strict unless it says so."""
    whole = {"description": None, "parameters": {"type": "object", "properties": {}}, "strict": False}
    return {
        "tools": [
            whole | {name: value for name, value in tool.items() if value is not None}
            for tool in given.get("tools", [])
        ],
        "tool_choice": given.get("tool_choice", "auto"),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
    }


def _tool(value: Any, path: str, limits: RequestLimits) -> Tool:
    _check_function(value, path)
    given = read_object(value, _TOOL_FIELDS, path, "type", "name", neutrals=_NEUTRAL_TOOL)
    return make_tool({name: given[name] for name in given if name != "type"}, path, limits)


def _check_function(value: Any, path: str) -> None:
    if isinstance(value, dict) and value.get("type", "function") != "function":
        where = f"{path}.type"
        message = f"{where}: only tools of type 'function' are supported."
        raise InvalidParameter(where, message, code="unsupported_parameter")


def _choice(choice: str | JsonObject, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(choice, str):
        return chosen_word(choice, tools)
    given = read_object(choice, _CHOICE_FIELDS, "tool_choice", "type")
    match given["type"]:
        case "function" if given.keys() <= {"type", "name"}:
            name = read_object(given, _CHOICE_FIELDS, "tool_choice", "name")["name"]
            return ToolChoice(ToolUse.NAMED, known_name(name, "tool_choice.name", tools))
        case "allowed_tools" if "name" not in given:
            return _allowed(given, tools)
    message = "tool_choice.type must be function or allowed_tools, with its own fields alone."
    raise InvalidParameter("tool_choice.type", message)


def _allowed(given: JsonObject, tools: Sequence[Tool]) -> ToolChoice:
    rules = read_object(given, _CHOICE_FIELDS, "tool_choice", "mode", "tools")
    if rules["mode"] not in ("auto", "required"):
        raise InvalidParameter("tool_choice.mode", "tool_choice.mode must be auto or required.")
    names = set()
    for index, value in enumerate(rules["tools"]):
        where = f"tool_choice.tools.{index}"
        _check_function(value, where)
        named = read_object(value, (_TYPE, _NAME), where, "type", "name")
        names.add(known_name(named["name"], f"{where}.name", tools))
    if not names:
        raise InvalidParameter("tool_choice.tools", "tool_choice.tools must name at least one tool.")
    return ToolChoice(ToolUse(rules["mode"]), allowed=frozenset(names))
