"""OpenAPI schemas of the answers of Anthropic's endpoints."""

from __future__ import annotations

from penstock.api_fields.strict_json import JsonObject
from penstock.server.http.openapi import INTEGER, OPTIONAL_STRING, STRING, list_of, object_of

__all__ = ["SCHEMAS"]

_ANTHROPIC_BLOCKS = [
    object_of({"type": {"type": "string", "const": "thinking"}, "thinking": STRING, "signature": STRING}),
    object_of({"type": {"type": "string", "const": "text"}, "text": STRING}),
    object_of(
        {"type": {"type": "string", "const": "tool_use"}, "id": STRING, "name": STRING, "input": {"type": "object"}}
    ),
]
SCHEMAS: JsonObject = {
    "AnthropicError": object_of(
        {
            "type": {"type": "string", "const": "error"},
            "error": object_of({"type": STRING, "message": STRING}),
            "request_id": OPTIONAL_STRING,
        }
    ),
    "AnthropicMessage": object_of(
        {
            "id": STRING,
            "type": {"type": "string", "const": "message"},
            "role": {"type": "string", "const": "assistant"},
            "model": STRING,
            "content": list_of({"anyOf": _ANTHROPIC_BLOCKS}),
            "stop_reason": {"type": "string", "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": OPTIONAL_STRING,
            "usage": object_of(
                {
                    "input_tokens": INTEGER,
                    "cache_creation_input_tokens": INTEGER,
                    "cache_read_input_tokens": INTEGER,
                    "output_tokens": INTEGER,
                }
            ),
            "certificate": OPTIONAL_STRING,
        },
        optional=("certificate",),
    ),
    "AnthropicCount": object_of({"input_tokens": INTEGER}),
}
