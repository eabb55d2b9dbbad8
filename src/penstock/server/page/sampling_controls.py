"""`GET /engine/sampling`: every sampling parameter with type, range, default and meaning.

The list is `penstock.sampling.PARAMETERS`, and the chat endpoint's own table says which of them it takes. So a file
that adds a parameter also adds a control.
"""

from __future__ import annotations

from starlette.responses import Response

from penstock.api_fields.chat_options import CHAT_SAMPLING_FIELDS
from penstock.api_fields.strict_json import JsonObject
from penstock.sampling import PARAMETERS, Parameter
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["CHAT_DEFAULTS", "describe", "routes"]

_CHAT_NAMES = frozenset(field.name for field in CHAT_SAMPLING_FIELDS)

CHAT_DEFAULTS: JsonObject = {"max_tokens": None}
"""Defaults of a conversation that differ from the parameter's own; None: as many as the context holds."""


def describe(parameter: Parameter, defaults: JsonObject) -> JsonObject:
    """One parameter as JSON; `defaults` are the served model's own.

    `default` is the value in a conversation that does not give one; `chat` is whether `/v1/chat/completions` takes the
    parameter as described here; `random_only` is whether it has no effect at temperature 0.
    """
    return {
        "name": parameter.name,
        "schema": dict(parameter.kind.schema()),
        "nullable": parameter.nullable,
        "default": (CHAT_DEFAULTS | defaults).get(parameter.name, parameter.default),
        "random_only": parameter.random_only,
        "chat": parameter.name in _CHAT_NAMES,
        "doc": parameter.doc,
    }


def routes(serving: Serving) -> tuple[Route, ...]:
    """`GET /engine/sampling`."""
    defaults = dict(serving.card.sampling_defaults)
    controls = {"object": "list", "data": [describe(parameter, defaults) for parameter in PARAMETERS]}

    async def sampling_controls() -> Response:
        """Every sampling parameter: name, JSON schema of its values, default, meaning."""
        return json_response(200, controls)

    return (Route("GET", "/engine/sampling", sampling_controls, answers("SamplingControls", 500)),)
