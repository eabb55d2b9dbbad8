"""Build the OpenAPI document: request schemas, from the tables that requests are checked against, and responses.

If a schema cannot express a rule, such as a limit across two fields, the error that refuses the request states it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api_fields.fields import Field, Neutrals
from penstock.api_fields.request_options import NEUTRAL_STREAM_OPTIONS, STREAM_OPTIONS_FIELDS
from penstock.api_fields.step_views import STEP_TIMES
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.measurements import PARTS
from penstock.contract.plan import StallReason

__all__ = [
    "ERROR",
    "INTEGER",
    "NUMBER",
    "OPTIONAL_STRING",
    "PARTS_SCHEMA",
    "SHARED_SCHEMAS",
    "STEP_SCHEMA",
    "STRING",
    "answers",
    "list_of",
    "nullable",
    "object_of",
    "reference",
    "request_body",
]

STRING: JsonObject = {"type": "string"}
INTEGER: JsonObject = {"type": "integer"}
NUMBER: JsonObject = {"type": "number"}
OPTIONAL_STRING: JsonObject = {"type": ["string", "null"]}


def object_of(properties: Mapping[str, Any], *, optional: Sequence[str] = ()) -> JsonObject:
    """The schema of an object with these properties; all but the optional ones are required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def list_of(items: JsonObject) -> JsonObject:
    """The schema of a list."""
    return {"type": "array", "items": items}


def reference(name: str) -> JsonObject:
    """A reference to one of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: JsonObject) -> JsonObject:
    """The schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


PARTS_SCHEMA = object_of(
    dict.fromkeys((*PARTS, "total"), NUMBER)
    | {"queue_for": {"type": "object", "additionalProperties": {"type": "number"}}}
)
"""The schema of `api_fields.timings.parts_object`."""

STEP_SCHEMA = object_of(
    {"step": INTEGER, "at": NUMBER}
    | {f"{name}_ms": NUMBER for name in STEP_TIMES}
    | dict.fromkeys(("decoding", "drafted", "chunk", "read", "waiting"), INTEGER)
    | {
        "stall": nullable(
            object_of(
                {"reason": {"type": "string", "enum": list(StallReason)}, "need": INTEGER, "have": INTEGER},
            )
        ),
        "own_decode_ms": NUMBER,
        "own_prompts_ms": NUMBER,
        "own_positions": INTEGER,
    },
    optional=("own_decode_ms", "own_prompts_ms", "own_positions"),
)
"""The schema of `api_fields.step_views.step_object`."""

ERROR = object_of({"message": STRING, "type": STRING, "param": OPTIONAL_STRING, "code": STRING})

SHARED_SCHEMAS: JsonObject = {
    "Error": object_of({"error": ERROR}),
}
"""Component name -> schema, of responses that all endpoints share; each package adds its own."""

_STATUSES = {
    400: "A field is wrong, unknown or not supported; the error names it.",
    401: "A valid API key is needed.",
    403: "This Host, this web page or this key may not do that.",
    404: "What is asked for is not here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    429: "The queue is full; try again after Retry-After seconds.",
    431: "There are too many headers.",
    500: "The server failed.",
    503: "The engine is dead, or the server is shutting down.",
    504: "The request took longer than this server gives any.",
}


def request_body(fields: Sequence[Field], neutrals: Neutrals, *required: str) -> JsonObject:
    """The OpenAPI request body for a table of fields, of which `required` must be present."""
    schema = _closed_object(fields, neutrals, required)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(name: str, *statuses: int, stream: str = "", error: str = "Error") -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of an endpoint: component `name` for 200, the error object for `statuses` (all if none)."""
    content: JsonObject = {"application/json": {"schema": reference(name)}}
    if stream:
        content[stream] = {"schema": {"type": "string"}}
    result: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    failure = {"application/json": {"schema": reference(error)}}
    for status in statuses or _STATUSES:
        result[status] = {"description": _STATUSES[status], "content": failure}
    return result


def _closed_object(fields: Sequence[Field], neutrals: Neutrals, required: Sequence[str] = ()) -> JsonObject:
    properties = {field.name: _property(field, field.name in required) for field in fields}
    for name, values in neutrals.items():
        properties[name] = {
            "enum": [*values, None],
            "description": "Not supported: accepted at its neutral value only.",
        }
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _property(field: Field, required: bool) -> JsonObject:
    """A field's schema. Null is the same as leaving the field out, so only an optional field may be null."""
    schema = field.kind.schema
    if field.name == "stream_options":
        schema = _closed_object(STREAM_OPTIONS_FIELDS, NEUTRAL_STREAM_OPTIONS)
    if not required:
        schema = nullable({key: value for key, value in schema.items() if key not in ("default", "description")})
    default = field.kind.schema.get("default")
    return schema | {"description": field.doc} | ({} if default is None else {"default": default})
