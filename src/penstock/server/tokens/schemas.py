"""OpenAPI schemas of the token endpoints' responses."""

from __future__ import annotations

from penstock.api_fields.strict_json import JsonObject
from penstock.server.http.openapi import INTEGER, STRING, list_of, nullable, object_of

__all__ = ["SCHEMAS"]

SCHEMAS: JsonObject = {
    "Tokenized": object_of(
        {
            "count": INTEGER,
            "max_model_len": INTEGER,
            "tokens": list_of(INTEGER),
            "token_strs": nullable(list_of(STRING)),
        }
    ),
    "Detokenized": object_of({"prompt": STRING}),
    "Rendered": object_of({"prompt": STRING}),
}
