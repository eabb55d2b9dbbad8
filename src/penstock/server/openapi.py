"""The OpenAPI document's schemas, derived from the tables that requests are checked against.

Decides how requests, answers and errors are described. Knows no checking: what a schema cannot say (limits across
fields, the served model's sizes) is said by the 400 that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.server.fields import NEUTRAL_STREAM_OPTIONS, Field, Neutrals
from penstock.server.parameters import STREAM_OPTIONS_FIELDS
from penstock.server.prompt_logprobs import PROMPT_LOGPROBS_SCHEMA
from penstock.server.strict_json import JsonObject

__all__ = ["COMPONENTS", "answers", "reference", "request_body"]

_STRING: JsonObject = {"type": "string"}
_INTEGER: JsonObject = {"type": "integer"}
_NUMBER: JsonObject = {"type": "number"}
_OPTIONAL_STRING: JsonObject = {"type": ["string", "null"]}
_FINISH: JsonObject = {"type": "string", "enum": ["stop", "length", "repetition", "tool_calls", "abort"]}
_STOP_REASON: JsonObject = {"type": ["string", "integer", "null"]}


def _object(properties: Mapping[str, Any], *, optional: Sequence[str] = ()) -> JsonObject:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: JsonObject) -> JsonObject:
    return {"type": "array", "items": items}


def reference(name: str) -> JsonObject:
    """A reference to one of `COMPONENTS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def _nullable(schema: JsonObject) -> JsonObject:
    return {"anyOf": [schema, {"type": "null"}]}


_TOKEN_LOGPROB: JsonObject = {"token": _STRING, "logprob": {"type": "number"}, "bytes": _list(_INTEGER)}
_CHAT_LOGPROB = _object(_TOKEN_LOGPROB | {"top_logprobs": _list(_object(_TOKEN_LOGPROB))})
_TOOL_CALL = _object(
    {
        "id": _STRING,
        "type": {"type": "string", "const": "function"},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_CHAT_MESSAGE = _object(
    {
        "role": _STRING,
        "content": _OPTIONAL_STRING,
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": _list(_TOOL_CALL),
    },
    optional=("reasoning_content", "tool_calls"),
)
_CHAT_CHOICE = _object(
    {
        "index": _INTEGER,
        "message": _CHAT_MESSAGE,
        "logprobs": _nullable(_object({"content": _list(_CHAT_LOGPROB), "refusal": {"type": "null"}})),
        "finish_reason": _FINISH,
        "stop_reason": _STOP_REASON,
    }
)
_TOP_OBJECT: JsonObject = {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
_COMPLETION_LOGPROBS = _object(
    {
        "text_offset": _list(_INTEGER),
        "token_logprobs": _list({"type": ["number", "null"]}),
        "tokens": _list(_STRING),
        "top_logprobs": _nullable(_list(_TOP_OBJECT)),
    }
)
_COMPLETION_CHOICE = _object(
    {
        "index": _INTEGER,
        "text": _STRING,
        "logprobs": _nullable(_COMPLETION_LOGPROBS),
        "finish_reason": _FINISH,
        "stop_reason": _STOP_REASON,
        "prompt_logprobs": PROMPT_LOGPROBS_SCHEMA,
    },
    optional=("prompt_logprobs",),
)


def _answer(kind: str, choice: JsonObject, usage: str = "Usage", **optional: JsonObject) -> JsonObject:
    return _object(
        {
            "id": _STRING,
            "object": {"type": "string", "const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "system_fingerprint": {"type": "null"},
            "choices": _list(choice),
            "usage": reference(usage),
            "timings": reference("Timings"),
            **optional,
        },
        optional=("timings", *optional),
    )


_ANTHROPIC_BLOCKS = [
    _object({"type": {"type": "string", "const": "thinking"}, "thinking": _STRING, "signature": _STRING}),
    _object({"type": {"type": "string", "const": "text"}, "text": _STRING}),
    _object(
        {"type": {"type": "string", "const": "tool_use"}, "id": _STRING, "name": _STRING, "input": {"type": "object"}}
    ),
]
_ERROR = _object({"message": _STRING, "type": _STRING, "param": _OPTIONAL_STRING, "code": _STRING})

COMPONENTS: JsonObject = {
    "Error": _object({"error": _ERROR}),
    "Usage": _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
        }
    ),
    "ChatUsage": _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
            "completion_tokens_details": _object({"reasoning_tokens": _INTEGER}),
        }
    ),
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE, "ChatUsage", prompt_logprobs=PROMPT_LOGPROBS_SCHEMA),
    "Completion": _answer("text_completion", _COMPLETION_CHOICE),
    "Embeddings": _object(
        {
            "id": _STRING,
            "object": {"type": "string", "const": "list"},
            "created": _INTEGER,
            "model": _STRING,
            "data": _list(
                _object(
                    {
                        "object": {"type": "string", "const": "embedding"},
                        "index": _INTEGER,
                        "embedding": {"anyOf": [_list(_NUMBER), _STRING]},
                    }
                )
            ),
            "usage": _object({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
        }
    ),
    "Generated": _object(
        {
            "text": _STRING,
            "finish_reason": _FINISH,
            "usage": reference("Usage"),
            "timings": reference("Timings"),
            "prompt_logprobs": PROMPT_LOGPROBS_SCHEMA,
        },
        optional=("timings", "prompt_logprobs"),
    ),
    "Timings": _object(
        {
            "queue_ms": _NUMBER,
            "cache_n": _INTEGER,
            "prompt_n": _INTEGER,
            "prompt_ms": _NUMBER,
            "prompt_per_second": _nullable(_NUMBER),
            "predicted_n": _INTEGER,
            "predicted_ms": _NUMBER,
            "predicted_per_token_ms": _nullable(_NUMBER),
            "predicted_per_second": _nullable(_NUMBER),
            "total_ms": _NUMBER,
        }
    ),
    "Model": _object(
        {
            "id": _STRING,
            "object": {"type": "string", "const": "model"},
            "created": _INTEGER,
            "owned_by": _STRING,
            "root": _STRING,
            "parent": {"type": "null"},
            "max_model_len": _INTEGER,
        }
    ),
    "ModelList": _object({"object": {"type": "string", "const": "list"}, "data": _list(reference("Model"))}),
    "SamplingControls": _object(
        {
            "object": {"type": "string", "const": "list"},
            "data": _list(
                _object(
                    {
                        "name": _STRING,
                        "schema": {"type": "object", "description": "The JSON schema of the parameter's values."},
                        "nullable": {"type": "boolean"},
                        "default": {"description": "What a conversation gets that says nothing."},
                        "random_only": {"type": "boolean", "description": "It means nothing at temperature 0."},
                        "chat": {"type": "boolean", "description": "/v1/chat/completions takes it as it is here."},
                        "doc": _STRING,
                    }
                )
            ),
        }
    ),
    "Health": _object(
        {
            "status": {"type": "string", "enum": ["ok", "dead"]},
            "reason": _STRING,
            "running": _INTEGER,
            "waiting": _INTEGER,
            "free_blocks": _INTEGER,
            "total_blocks": _INTEGER,
            "steps": _INTEGER,
            "error": _ERROR,
        },
        optional=("error",),
    ),
    "AnthropicError": _object(
        {
            "type": {"type": "string", "const": "error"},
            "error": _object({"type": _STRING, "message": _STRING}),
            "request_id": _OPTIONAL_STRING,
        }
    ),
    "AnthropicMessage": _object(
        {
            "id": _STRING,
            "type": {"type": "string", "const": "message"},
            "role": {"type": "string", "const": "assistant"},
            "model": _STRING,
            "content": _list({"anyOf": _ANTHROPIC_BLOCKS}),
            "stop_reason": {"type": "string", "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _OPTIONAL_STRING,
            "usage": _object(
                {
                    "input_tokens": _INTEGER,
                    "cache_creation_input_tokens": _INTEGER,
                    "cache_read_input_tokens": _INTEGER,
                    "output_tokens": _INTEGER,
                }
            ),
        }
    ),
    "Response": {
        "type": "object",
        "properties": {
            "id": _STRING,
            "object": {"type": "string", "const": "response"},
            "created_at": _INTEGER,
            "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete", "cancelled", "failed"]},
            "model": _STRING,
            "output": _list({"type": "object"}),
            "usage": _nullable({"type": "object"}),
        },
        "required": ["id", "object", "created_at", "status", "model", "output", "usage"],
    },
    "Deleted": _object({"id": _STRING, "object": _STRING, "deleted": {"type": "boolean"}}),
    "AnthropicCount": _object({"input_tokens": _INTEGER}),
    "Tokenized": _object(
        {
            "count": _INTEGER,
            "max_model_len": _INTEGER,
            "tokens": _list(_INTEGER),
            "token_strs": _nullable(_list(_STRING)),
        }
    ),
    "Detokenized": _object({"prompt": _STRING}),
    "Rendered": _object({"prompt": _STRING}),
    "Version": _object({"version": _STRING}),
    "Live": _object({"status": {"type": "string", "enum": ["live"]}}),
    "Ready": _object(
        {"status": {"type": "string", "enum": ["ready", "not ready"]}, "reason": _STRING, "error": _ERROR},
        optional=("error",),
    ),
    "Aborted": _object({"aborted": _list(_STRING)}),
    "Reset": _object({"reset": {"type": "boolean"}}),
}

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
    """The OpenAPI request body for a table of fields, some of which must be there."""
    schema = _closed_object(fields, neutrals, required)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(name: str, *statuses: int, stream: str = "", error: str = "Error") -> dict[int | str, dict[str, Any]]:
    """The OpenAPI answers of an endpoint: component `name` for 200, the error object for `statuses` (all if none)."""
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
    """A field's schema; null is the same as leaving it out, so one that must be there may not be null."""
    schema = field.kind.schema
    if field.name == "stream_options":
        schema = _closed_object(STREAM_OPTIONS_FIELDS, NEUTRAL_STREAM_OPTIONS)
    if not required:
        schema = _nullable({key: value for key, value in schema.items() if key not in ("default", "description")})
    default = field.kind.schema.get("default")
    return schema | {"description": field.doc} | ({} if default is None else {"default": default})
