"""`GET /v1/models` and `GET /v1/models/{model_id}`: the served model, once for each of its names, and its adapters.

Both vendors have these paths: a request with the header `anthropic-version` is answered in Anthropic's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from fastapi import Request, Response

from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.adapter import AdapterFacts
from penstock.contract.errors import InvalidParameter, UnknownModel
from penstock.contract.model import ModelCard
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import HttpRefusal, json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = [
    "ANTHROPIC",
    "adapter_object",
    "anthropic_list",
    "anthropic_model",
    "model_object",
    "not_deletable",
    "routes",
]

ANTHROPIC = "anthropic-version"
MOST_MODELS = 1000


def routes(serving: Serving) -> tuple[Route, ...]:
    """Both endpoints, and the refusal to delete a model."""
    card = serving.card

    def adapters() -> Mapping[str, AdapterFacts]:
        return serving.client.adapters() if card.takes_adapters else {}

    async def list_models(http_request: Request) -> Response:
        """The served model under each of its names, then each adapter that is loaded."""
        loaded = adapters()
        if ANTHROPIC in http_request.headers:
            names = (*card.names, *loaded)
            return json_response(200, anthropic_list(names, card.created, http_request.query_params))
        data = [model_object(card, name) for name in card.names]
        data += [adapter_object(card, facts) for facts in loaded.values()]
        return json_response(200, {"object": "list", "data": data})

    async def retrieve_model(http_request: Request, model_id: str) -> Response:
        """The served model, by name; names may hold slashes."""
        loaded = adapters()
        if model_id not in loaded and not card.answers_to(model_id):
            raise UnknownModel(printable(model_id), *card.names, *loaded)
        if ANTHROPIC in http_request.headers:
            return json_response(200, anthropic_model(model_id, card.created))
        if model_id in loaded and model_id not in card.names:
            return json_response(200, adapter_object(card, loaded[model_id]))
        return json_response(200, model_object(card, model_id))

    async def delete_model(model_id: str) -> Response:
        """Refused: what is served is the operator's decision."""
        if not serving.card_now.answers_to(model_id):
            raise UnknownModel(printable(model_id), *card.names)
        raise not_deletable()

    return (
        Route("DELETE", "/v1/models/{model_id:path}", delete_model, documented=False),
        Route("GET", "/v1/models", list_models, answers("ModelList", 500)),
        Route("GET", "/v1/models/{model_id:path}", retrieve_model, answers("Model", 404)),
    )


def not_deletable() -> HttpRefusal:
    """The refusal to delete a model."""
    message = "The served model is the operator's choice; it cannot be deleted over HTTP."
    return HttpRefusal(403, message, code="model_not_deletable", kind="permission_error")


def anthropic_list(names: Sequence[str], created: int, query: Mapping[str, str]) -> JsonObject:
    """A page of Anthropic's list of models; `created` in seconds since 1970.

    Raises:
        InvalidParameter: a query parameter is unknown or invalid.
    """
    names = list(names)
    for name in query:
        if name not in ("limit", "after_id", "before_id"):
            where = printable(name)
            raise InvalidParameter(where, f"{where!r} is not supported here.", code="unsupported_parameter")
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:5]) <= MOST_MODELS:
        raise InvalidParameter("limit", f"limit must lie in 1..{MOST_MODELS}.")
    if query.get("after_id") in names:
        names = names[names.index(query["after_id"]) + 1 :]
    if query.get("before_id") in names:
        names = names[: names.index(query["before_id"])]
    data = [anthropic_model(name, created) for name in names[: int(limit)]]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": len(names) > len(data), **ends}


def anthropic_model(name: str, created: int) -> JsonObject:
    """A model in Anthropic's format; `created` in seconds since 1970."""
    since = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": since}


def adapter_object(card: ModelCard, facts: AdapterFacts) -> JsonObject:
    """An adapter in OpenAI's format: `parent` is the model that it adapts, `root` where its files are."""
    return model_object(card, facts.name) | {"created": facts.created, "root": facts.path, "parent": card.name}


def model_object(card: ModelCard, name: str) -> JsonObject:
    """A model in OpenAI's format."""
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "default_sampling_params": dict(card.sampling_defaults),
    }
