"""`GET /engine/sampling`: every sampling parameter with type, range, default and meaning, for whoever draws controls.

Decides nothing about parameters: the list is `penstock.sampling.PARAMETERS`, and which of them the chat endpoint takes
as they are is read from its own table of fields. So a parameter's new file is a new control, and nothing else changes.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from penstock.sampling import PARAMETERS, Parameter
from penstock.server.chat import CHAT_FIELDS
from penstock.server.failures import json_response
from penstock.server.openapi import answers
from penstock.server.strict_json import JsonObject

__all__ = ["CHAT_DEFAULTS", "add_sampling_controls", "describe"]

CHAT_DEFAULTS: JsonObject = {"max_tokens": None}
"""Where a conversation's default is another than the parameter's own: as much as the context holds."""


def add_sampling_controls(app: FastAPI) -> None:
    """Put the list on its path."""
    body: JsonObject = {"object": "list", "data": [describe(parameter) for parameter in PARAMETERS]}

    @app.get("/engine/sampling", responses=answers("SamplingControls", 500), response_class=Response)
    async def sampling_controls() -> Response:
        """Every sampling parameter: name, JSON schema of its values, default, meaning."""
        return json_response(200, body)


def describe(parameter: Parameter) -> JsonObject:
    """One parameter, as JSON.

    `default` is what a conversation gets that says nothing; `chat` is whether `/v1/chat/completions` takes the
    parameter as described here; `random_only` is whether it means nothing at temperature 0.
    """
    return {
        "name": parameter.name,
        "schema": dict(parameter.kind.schema()),
        "nullable": parameter.nullable,
        "default": CHAT_DEFAULTS.get(parameter.name, parameter.default),
        "random_only": parameter.random_only,
        "chat": _is_chat_field(parameter),
        "doc": parameter.doc,
    }


def _is_chat_field(parameter: Parameter) -> bool:
    """Whether the chat endpoint has the parameter's own schema under its name (it spells `logprobs` as a boolean)."""
    return any(
        field.name == parameter.name and dict(field.kind.schema) == parameter.json_schema() for field in CHAT_FIELDS
    )
