"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM. Need an admin key if the server has keys.

A name is what requests call an adapter, never a path. A path must lie in the operator's folder; the engine's side
checks this.
"""

from __future__ import annotations

from fastapi import Request, Response

from penstock.api_fields.fields import TEXT, Field, Neutrals, read_fields
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["LOAD_FIELDS", "UNLOAD_FIELDS", "routes"]

_NAME = Field("lora_name", TEXT, "What requests call the adapter.")
LOAD_FIELDS = (_NAME, Field("lora_path", TEXT, "Its directory, or .gguf file, in the folder of --lora-dir."))
UNLOAD_FIELDS = (_NAME,)
NEUTRAL_LOAD: Neutrals = {"load_inplace": (False,)}
NEUTRAL_UNLOAD: Neutrals = {"lora_int_id": ()}


def routes(serving: Serving) -> tuple[Route, ...]:
    """Both endpoints."""
    limits = serving.limits

    async def load_lora_adapter(http_request: Request) -> Response:
        """Load an adapter, which requests may name from now on."""
        name, path = await serving.read(http_request, lambda body: _read_load(body, limits))
        if name in serving.card.names:
            raise InvalidParameter("lora_name", "lora_name is the name of the model itself.", code="adapter_loaded")
        facts = await serving.client.load_adapter(name, path)
        return json_response(200, {"loaded": facts.name, "rank": facts.rank, "bytes": facts.bytes})

    async def unload_lora_adapter(http_request: Request) -> Response:
        """Take no more requests for an adapter, and unload it when its present requests are answered."""
        name = await serving.read(http_request, lambda body: _read_unload(body, limits))
        await serving.client.unload_adapter(name)
        return json_response(200, {"unloaded": name})

    loading = request_body(LOAD_FIELDS, NEUTRAL_LOAD, "lora_name", "lora_path")
    unloading = request_body(UNLOAD_FIELDS, NEUTRAL_UNLOAD, "lora_name")
    given = (400, 401, 403, 500, 503)
    return (
        Route("POST", "/v1/load_lora_adapter", load_lora_adapter, answers("AdapterLoaded", *given), loading),
        Route(
            "POST", "/v1/unload_lora_adapter", unload_lora_adapter, answers("AdapterUnloaded", *given, 404), unloading
        ),
    )


def _read_load(body: JsonObject, limits: RequestLimits) -> tuple[str, str]:
    given = read_fields(body, LOAD_FIELDS, NEUTRAL_LOAD)
    return _name(given, limits), _text(given, "lora_path")


def _read_unload(body: JsonObject, limits: RequestLimits) -> str:
    return _name(read_fields(body, UNLOAD_FIELDS, NEUTRAL_UNLOAD), limits)


def _name(given: JsonObject, limits: RequestLimits) -> str:
    name = _text(given, "lora_name")
    if len(name) > limits.max_name_chars:
        raise InvalidParameter("lora_name", f"lora_name may have at most {limits.max_name_chars} characters.")
    return name


def _text(given: JsonObject, field: str) -> str:
    value = given.get(field)
    if not isinstance(value, str):
        raise InvalidParameter(field, f"{field} is missing.", code="missing_value")
    return value
