"""Request fields with the bounds of the served model, for the OpenAPI document.

Decides which schemas depend on the model: on its name, context, vocabulary, hidden size, sampling defaults, and how its
thinking can be controlled. These bounds only describe what the parsers themselves check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.api_fields.fields import Field
from penstock.api_fields.reasoning import EFFORTS, effort_variables, level_variables
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.model import ModelCard

__all__ = ["LENGTHS", "fitted"]

LENGTHS = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1, "min_tokens": 0}
"""Fields that count tokens, with their minimum; the maximum is the context length."""

_IDS = frozenset({"prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids"})
"""Fields in which every integer is a token id."""


def fitted(fields: Sequence[Field], card: ModelCard, lengths: Mapping[str, int] = LENGTHS) -> tuple[Field, ...]:
    """`fields` with schemas restricted to what this model supports; `lengths` has the form of `LENGTHS`."""
    return tuple(replace(field, kind=replace(field.kind, schema=_schema(field, card, lengths))) for field in fields)


def _schema(field: Field, card: ModelCard, lengths: Mapping[str, int]) -> JsonObject:
    schema = field.kind.schema
    defaults = dict(card.sampling_defaults)
    if field.name in defaults and "default" in schema:
        return schema | {"default": defaults[field.name]}
    if field.name in lengths:
        bounds = {"type": "integer", "minimum": lengths[field.name], "maximum": card.max_model_len}
        return {name: schema[name] for name in ("default", "description") if name in schema} | bounds
    if field.name in _IDS:
        bounded: JsonObject = _with_ids(schema, {"type": "integer", "minimum": 0, "maximum": card.vocab_size - 1})
        return bounded
    match field.name:
        case "model":
            any_name = card.any_name or card.takes_adapters
            return {"type": "string"} if any_name else {"type": "string", "enum": list(card.names)}
        case "reasoning_effort":
            return schema | {"enum": _allowed(effort_variables, card)}
        case "output_config":
            efforts = [effort for effort in schema["properties"]["effort"]["enum"] if effort]
            level = {"enum": [*(effort for effort in efforts if effort in _allowed(level_variables, card)), None]}
            return schema | {"properties": schema["properties"] | {"effort": level}}
        case "thinking" if not card.thinks:
            return {"anyOf": [each for each in schema["anyOf"] if each["properties"]["type"] != {"const": "enabled"}]}
        case "thinking_token_budget" if not card.thinks:
            return {"type": "null"}
        case "dimensions":
            return {"type": "integer", "minimum": 1, "maximum": card.hidden_size}
        case "truncate_prompt_tokens":
            return {"type": "integer", "minimum": -1, "maximum": card.max_model_len, "not": {"const": 0}}
    return schema


def _with_ids(schema: Any, token_id: JsonObject) -> Any:
    """`schema` with every integer in it replaced by `token_id`."""
    if isinstance(schema, list):
        return [_with_ids(each, token_id) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "integer":
        return token_id
    return {name: _with_ids(value, token_id) for name, value in schema.items()}


def _allowed(variables: Callable[[str, ModelCard, str], object], card: ModelCard) -> list[str]:
    """The efforts that the model's chat template can express."""
    allowed = []
    for effort in EFFORTS:
        try:
            variables(effort, card, "effort")
        except InvalidParameter:
            continue
        allowed.append(effort)
    return allowed
