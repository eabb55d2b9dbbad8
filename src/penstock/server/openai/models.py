"""`GET /v1/models` and `GET /v1/models/{model_id}`: the served model, once for each of its names."""

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

    async def list_models() -> Response:
        """The served model under each of its names."""
        return json_response(200, {"object": "list", "data": [_model_object(card, name) for name in card.names]})

    async def retrieve_model(model_id: str) -> Response:
        """The served model, by name; names may hold slashes."""
        if not card.answers_to(model_id):
            raise UnknownModel(printable(model_id), *card.names)
        return json_response(200, _model_object(card, model_id))

    return (
        Route("GET", "/v1/models", list_models, answers("ModelList", 500)),
        Route("GET", "/v1/models/{model_id:path}", retrieve_model, answers("Model", 404)),
    )


def _model_object(card: ModelCard, name: str) -> JsonObject:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }
