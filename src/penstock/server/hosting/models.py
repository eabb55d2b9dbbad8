"""The list of models and what each is doing, and the operator's routes to load, unload and pin them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from penstock.api_fields.fields import TEXT, Field, read_fields
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.hosting import ModelStatus
from penstock.contract.limits import RequestLimits
from penstock.server.delivery.serving import read_body_of
from penstock.server.hosting.dispatch import Parts
from penstock.server.http.access import Access
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route
from penstock.server.openai.models import (
    ANTHROPIC,
    adapter_object,
    anthropic_list,
    anthropic_model,
    model_object,
    not_deletable,
)

__all__ = ["routes"]

_FIELDS = (Field("model", TEXT, "The model, by any of its names."),)
_DOING = ("pinned", "requests", "waiting", "bytes", "loads", "load_seconds", "reason")


def routes(parts: Parts, limits: RequestLimits, access: Access, created: int) -> tuple[Route, ...]:
    """All routes of this module; `created` is when the server was started, in seconds since 1970."""
    models = parts.models

    async def list_models(http_request: Request) -> Response:
        """Every model under each of its names, loaded or not, followed by its adapters."""
        if ANTHROPIC in http_request.headers:
            return json_response(200, anthropic_list(models.names, created, http_request.query_params))
        data = [
            _object(parts, each, name, created)
            for each in models.statuses()
            for name in (*each.model.names, *each.adapters)
        ]
        return json_response(200, {"object": "list", "data": data})

    async def retrieve_model(http_request: Request, model_id: str) -> Response:
        """One model, by name; names may hold slashes."""
        status = parts.status(model_id)
        if ANTHROPIC in http_request.headers:
            return json_response(200, anthropic_model(model_id, created))
        return json_response(200, _object(parts, status, model_id, created))

    async def delete_model(model_id: str) -> Response:
        """Refused: what is served is the operator's decision."""
        parts.status(model_id)
        raise not_deletable()

    def move(action: Callable[[str], Awaitable[None]], doc: str) -> Callable[[Request], Awaitable[Response]]:
        async def moved(http_request: Request) -> Response:
            name = await read_body_of(http_request, _read_name, limits, access)
            parts.status(name)
            await action(name)
            return json_response(200, _object(parts, parts.status(name), name, created))

        moved.__doc__ = doc
        return moved

    async def unpin(name: str) -> None:
        models.unpin(name)

    extra, given = request_body(_FIELDS, {}, "model"), answers("Model", 400, 401, 403, 404, 503)
    moves = (
        ("load", models.load, "Load a model, and answer when it is loaded."),
        ("unload", models.unload, "Unload a model when it has answered what it has; if it was pinned, it is no more."),
        ("pin", models.pin, "Load a model, and have it keep its room whatever others need."),
        ("unpin", unpin, "Let a model make room for others again."),
    )
    return (
        Route("DELETE", "/v1/models/{model_id:path}", delete_model, documented=False),
        Route("GET", "/v1/models", list_models, answers("ModelList", 500)),
        Route("GET", "/v1/models/{model_id:path}", retrieve_model, answers("Model", 404)),
        *(Route("POST", f"/models/{name}", move(action, doc), given, extra) for name, action, doc in moves),
    )


def _read_name(body: JsonObject) -> str:
    name: str = read_fields(body, _FIELDS, {}).get("model", "")
    if not name:
        raise InvalidParameter("model", "model is missing: it names the model to be moved.")
    return name


def _object(parts: Parts, status: ModelStatus, name: str, created: int) -> JsonObject:
    """A model or an adapter in OpenAI's format, with what the model (or the adapter's model) is doing."""
    present = parts.models.present(name)
    described: JsonObject = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": status.model.names[0],
        "parent": None,
        "max_model_len": status.max_model_len or None,
        "default_sampling_params": {},
    }
    if present is not None:
        described |= model_object(present.card, name) | {"created": created}
    if name in status.adapters and name not in status.model.names:
        described |= {"parent": status.model.names[0]}
        if present is not None and (facts := present.client.adapters().get(name)) is not None:
            described = adapter_object(present.card, facts)
    doing = {each: getattr(status, each) for each in _DOING}
    return described | {"status": {"value": status.state.value, **doing}}
