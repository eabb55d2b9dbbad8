"""`GET /v1/models` and `GET /v1/models/{model_id}`: the one served model."""

from __future__ import annotations

from fastapi import Response

from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import UnknownModel
from penstock.contract.model import ModelCard
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """Both endpoints."""
    card = serving.card
    model = _model_object(card)

    async def list_models() -> Response:
        """The one served model, as a list."""
        return json_response(200, {"object": "list", "data": [model]})

    async def retrieve_model(model_id: str) -> Response:
        """The served model, by name; names may hold slashes."""
        if model_id != card.name:
            raise UnknownModel(printable(model_id), card.name)
        return json_response(200, model)

    return (
        Route("GET", "/v1/models", list_models, answers("ModelList", 500)),
        Route("GET", "/v1/models/{model_id:path}", retrieve_model, answers("Model", 404)),
    )


def _model_object(card: ModelCard) -> JsonObject:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "default_sampling_params": dict(card.sampling_defaults),
    }
