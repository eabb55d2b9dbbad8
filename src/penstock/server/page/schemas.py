"""OpenAPI schemas of the page's own endpoints."""

from __future__ import annotations

from penstock.api_fields.strict_json import JsonObject
from penstock.server.http.openapi import STRING, list_of, object_of

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
}
