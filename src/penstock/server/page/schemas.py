"""OpenAPI schemas of the page's own endpoints."""

from __future__ import annotations

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.engine_views import PrefixNode
from penstock.server.http.openapi import INTEGER, NUMBER, STEP_SCHEMA, STRING, list_of, object_of

__all__ = ["SCHEMAS"]

SCHEMAS: JsonObject = {
    "SamplingControls": object_of(
        {
            "object": {"type": "string", "const": "list"},
            "data": list_of(
                object_of(
                    {
                        "name": STRING,
                        "schema": {"type": "object", "description": "The JSON schema of the parameter's values."},
                        "nullable": {"type": "boolean"},
                        "default": {"description": "What a conversation gets that says nothing."},
                        "random_only": {"type": "boolean", "description": "It means nothing at temperature 0."},
                        "chat": {"type": "boolean", "description": "/v1/chat/completions takes it as it is here."},
                        "doc": STRING,
                    }
                )
            ),
        }
    ),
    "EngineSteps": object_of({"object": {"type": "string", "const": "list"}, "data": list_of(STEP_SCHEMA)}),
    "EnginePrefixes": object_of(
        {
            "block_size": INTEGER,
            "blocks": {"type": "integer", "description": "All blocks that can be found."},
            "left_out": {"type": "integer", "description": "Blocks of nodes that are not told."},
            "nodes": list_of(object_of(dict.fromkeys(PrefixNode._fields, INTEGER))),
        }
    ),
    "EngineTenants": object_of(
        {
            "object": {"type": "string", "const": "list"},
            "data": list_of(
                object_of(
                    {
                        "tenant": {"type": "string", "description": "Its name; empty for all others together."},
                        "share": NUMBER,
                        **dict.fromkeys(("running", "waiting", "waiting_tokens", "tokens"), INTEGER),
                        "own": {"type": "boolean", "description": "Whether it is the caller."},
                    }
                )
            ),
        }
    ),
}
