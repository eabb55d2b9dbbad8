"""`response_format`: OpenAI's spelling of `structured_outputs`.

A schema is always enforced, even with `strict: false`.
"""

from __future__ import annotations

from typing import Any

from penstock.api_fields.fields import BOOLEAN, OBJECT, TEXT, Field, Kind, read_fields
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter

__all__ = ["RESPONSE_FORMAT", "response_format_alias"]

_TYPES = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = (
    Field("name", TEXT, "The schema's name; not used."),
    Field("description", TEXT, "What the schema is for; not shown to the model."),
    Field("schema", OBJECT, "The JSON schema; any object when left out."),
    Field("strict", BOOLEAN, "The schema is followed to the letter either way."),
)
_FIELDS = (Field("type", TEXT, "text, json_object or json_schema."), Field("json_schema", OBJECT, "The schema."))

RESPONSE_FORMAT = Field(
    "response_format",
    Kind(
        "an object",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": list(_TYPES)},
                "json_schema": {
                    "type": "object",
                    "properties": {field.name: field.kind.schema for field in _SCHEMA_FIELDS},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        },
        lambda value: isinstance(value, dict),
    ),
    "The form of the answer: text, json_object, or json_schema with a schema, which is followed to the letter.",
)


def response_format_alias(given: JsonObject) -> dict[str, str]:
    """Move `response_format` to `structured_outputs` in `given`; returns the field names that errors must use instead.

    Raises:
        InvalidParameter: it is malformed, or both are given.
    """
    if "response_format" not in given:
        return {}
    form = _form(given.pop("response_format"))
    if form is None:
        return {}
    if given.get("structured_outputs") is not None:
        message = "response_format and structured_outputs contradict each other: give one of them."
        raise InvalidParameter("response_format", message)
    given["structured_outputs"] = form
    return {
        "structured_outputs": "response_format",
        "structured_outputs.json": "response_format.json_schema.schema",
    }


def _form(value: JsonObject) -> JsonObject | None:
    """The value of `structured_outputs`; None for free text."""
    read = read_fields(value, _FIELDS, {}, "response_format")
    kind = read.get("type")
    if kind not in _TYPES:
        raise InvalidParameter("response_format.type", f"response_format.type must be one of {', '.join(_TYPES)}.")
    if ("json_schema" in read) != (kind == "json_schema"):
        message = "response_format.json_schema belongs to type json_schema, and must be given there."
        raise InvalidParameter("response_format.json_schema", message, code="missing_value")
    if kind == "text":
        return None
    return {"json_object": True} if kind == "json_object" else {"json": _schema(read["json_schema"])}


def _schema(value: JsonObject) -> Any:
    read = read_fields(value, _SCHEMA_FIELDS, {}, "response_format.json_schema")
    if not read.get("name"):
        where = "response_format.json_schema.name"
        raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    return read.get("schema", {"type": "object"})
