"""Anthropic's `tools`, `tool_choice` and `thinking`: what the model may call, and whether it thinks first.

As at Anthropic, a model thinks only on request. Otherwise thinking is turned off, if its chat template has a switch,
and any reasoning is left out of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.api_fields.fields import BOOLEAN, INTEGER, OBJECT, TEXT, Field, Kind, Neutrals, read_object
from penstock.api_fields.reasoning import Variables, effort_variables, switch_variables
from penstock.api_fields.strict_json import JsonObject
from penstock.api_fields.tools import NAME_SCHEMA, ToolChoice, ToolOffer, check_tools, known_name, make_tool
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.tools import ReasoningUse, Tool, ToolUse
from penstock.server.anthropic.messages_content import CACHE_FIELD, CACHE_SCHEMA, check_cache_control

__all__ = ["MESSAGE_TOOL_FIELDS", "THINKING", "read_message_tools", "read_thinking"]

_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": NAME_SCHEMA,
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
        "cache_control": {"anyOf": [CACHE_SCHEMA, {"type": "null"}]},
    },
    "required": ["name", "input_schema"],
    "additionalProperties": False,
}


def _kind_schema(kinds: Sequence[str], required: Sequence[str] = (), **own: JsonObject) -> JsonObject:
    """The schema of an object whose `type` is one of `kinds`, with the fields that only these types have."""
    word: JsonObject = {"const": kinds[0]} if len(kinds) == 1 else {"enum": list(kinds)}
    return {
        "type": "object",
        "properties": {"type": word} | own,
        "required": ["type", *required],
        "additionalProperties": False,
    }


_PARALLEL: JsonObject = {"type": ["boolean", "null"]}
_CHOICE_SCHEMA = {
    "anyOf": [
        _kind_schema(["auto", "any", "none"], name={"type": "null"}, disable_parallel_tool_use=_PARALLEL),
        _kind_schema(["tool"], ["name"], name=NAME_SCHEMA, disable_parallel_tool_use=_PARALLEL),
    ]
}
_DISPLAY: JsonObject = {"enum": ["summarized", "omitted", None]}
_BUDGET: JsonObject = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1}
_THINKING_SCHEMA = {
    "anyOf": [
        _kind_schema(["enabled"], budget_tokens=_BUDGET, display=_DISPLAY),
        _kind_schema(["adaptive"], budget_tokens={"type": "null"}, display=_DISPLAY),
        _kind_schema(["disabled"], budget_tokens={"type": "null"}, display=_DISPLAY),
    ]
}
MESSAGE_TOOL_FIELDS = (
    Field(
        "tools",
        Kind("a list of tools", {"type": "array", "items": _TOOL_SCHEMA}, lambda value: isinstance(value, list)),
        "Functions that the model may call.",
    ),
    Field(
        "tool_choice",
        Kind("an object", _CHOICE_SCHEMA, lambda value: isinstance(value, dict)),
        "auto: the model decides. any, or a tool: it must call. none: no tool is shown. disable_parallel_tool_use ends"
        " an answer with its first call.",
    ),
)
THINKING = Field(
    "thinking",
    Kind("an object", _THINKING_SCHEMA, lambda value: isinstance(value, dict)),
    "enabled, adaptive: the model thinks first, and the answer has it in thinking blocks; adaptive asks nothing of a"
    " model that cannot. disabled, the default: it does not. budget_tokens, with enabled alone: most tokens of"
    " reasoning, after which the model answers.",
)

_TOOL_FIELDS = (
    Field("type", TEXT, "custom, the default."),
    Field("name", TEXT, "Letters, digits, dots, dashes and underscores."),
    Field("description", TEXT, "What it is for."),
    Field("input_schema", OBJECT, "JSON Schema of the arguments."),
    Field(
        "strict",
        BOOLEAN,
        "true: only arguments that fit the schema make a call, and it comes whole. Else they come as written.",
    ),
    CACHE_FIELD,
)
_NEUTRAL_TOOL: Neutrals = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (False,),
    "input_examples": ([],),
}
_CHOICE_FIELDS = (
    Field("type", TEXT, "auto, any, tool or none."),
    Field("name", TEXT, "The tool that must be called."),
    Field("disable_parallel_tool_use", BOOLEAN, "End the answer with its first call."),
)
_USES = {"auto": ToolUse.AUTO, "any": ToolUse.REQUIRED, "tool": ToolUse.NAMED, "none": ToolUse.NONE}
_THINKING_FIELDS = (
    Field("type", TEXT, "enabled, adaptive or disabled."),
    Field("budget_tokens", INTEGER, "Most tokens of reasoning; belongs to enabled."),
    Field("display", TEXT, "omitted: leave the reasoning out of the answer. summarized: return it; it comes whole."),
)


def read_message_tools(given: JsonObject, limits: RequestLimits) -> ToolOffer:
    """Parse `tools` and `tool_choice`.

    Raises:
        InvalidParameter: a tool is malformed, or the choice names an unknown tool.
    """
    values: list[Any] = given.get("tools", [])
    tools = [_tool(value, f"tools.{index}", limits) for index, value in enumerate(values)]
    check_tools(tools, "name", limits)
    rules = read_object(given.get("tool_choice", {"type": "auto"}), _CHOICE_FIELDS, "tool_choice", "type")
    parallel = not rules.get("disable_parallel_tool_use", False)
    return ToolOffer.made(tools, _choice(rules, tools), parallel=parallel, schema_field="input_schema")


def _tool(value: Any, path: str, limits: RequestLimits) -> Tool:
    if isinstance(value, dict) and value.get("type") not in (None, "custom"):
        where = f"{path}.type"
        message = f"{where}: only tools of the caller's own, of type 'custom', are supported."
        raise InvalidParameter(where, message, code="unsupported_parameter")
    given = read_object(value, _TOOL_FIELDS, path, "name", "input_schema", neutrals=_NEUTRAL_TOOL)
    check_cache_control(given, path)
    function = {key: given[key] for key in ("name", "description", "strict") if key in given}
    return make_tool(function | {"parameters": given["input_schema"]}, path, limits)


def _choice(rules: JsonObject, tools: Sequence[Tool]) -> ToolChoice:
    use = _USES.get(rules["type"])
    if use is None:
        raise InvalidParameter("tool_choice.type", f"tool_choice.type must be one of {', '.join(_USES)}.")
    if (use is ToolUse.NAMED) != ("name" in rules):
        message = "tool_choice.name belongs to the type 'tool', and must be given there."
        raise InvalidParameter("tool_choice.name", message, code="missing_value")
    if use is ToolUse.NAMED:
        return ToolChoice(use, known_name(rules["name"], "tool_choice.name", tools))
    if use is ToolUse.REQUIRED and not tools:
        raise InvalidParameter("tool_choice", "tool_choice asks for a call, but there are no tools.")
    return ToolChoice(use if tools else ToolUse.NONE)


def read_thinking(given: JsonObject, card: ModelCard) -> tuple[ReasoningUse, Variables]:
    """Parse `thinking`: whether the answer shows the reasoning, and the chat template's variables.

    Raises:
        InvalidParameter: `thinking` is malformed, or this model or server does not support it; names the field.
    """
    if "thinking" not in given:
        return ReasoningUse.HIDDEN, switch_variables(card, on=False)
    rules = read_object(given["thinking"], _THINKING_FIELDS, "thinking", "type")
    kind, display = rules["type"], rules.get("display", "summarized")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidParameter("thinking.type", "thinking.type must be one of enabled, adaptive, disabled.")
    if display not in ("summarized", "omitted"):
        raise InvalidParameter("thinking.display", "thinking.display must be one of summarized, omitted.")
    _check_budget(rules, kind)
    if kind == "disabled":
        return ReasoningUse.HIDDEN, effort_variables("none", card, "thinking")
    if kind == "enabled" and not card.thinks:
        message = "thinking: the served model does not think; leave it out, or send the type 'adaptive'."
        raise InvalidParameter("thinking", message, code="unsupported_parameter")
    use = ReasoningUse.HIDDEN if display == "omitted" else ReasoningUse.SPLIT
    return use, switch_variables(card, on=True) if card.thinks else {}


def _check_budget(rules: JsonObject, kind: str) -> None:
    budget = rules.get("budget_tokens")
    if budget is None:
        return
    if budget < 1:
        raise InvalidParameter("thinking.budget_tokens", "thinking.budget_tokens must be at least 1.")
    if kind != "enabled":
        message = "thinking.budget_tokens belongs to the type 'enabled'."
        raise InvalidParameter("thinking.budget_tokens", message, code="unsupported_parameter")
