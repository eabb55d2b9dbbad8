"""The HTTP application of a server of several models.

Its own endpoints concern all models: lists, probes, metrics, the page. Every other request goes to the part of the
model that it names, which has the endpoints of a server of one model (`server.application`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request, Response

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.hosting import Models, ServedModel
from penstock.contract.limits import RequestLimits
from penstock.contract.memory_budget import MemoryBudget
from penstock.server.admin import about
from penstock.server.admin.abort import ABORT_FIELDS, parse_abort
from penstock.server.admin.metrics import RequestCounter, metrics_route
from penstock.server.application import ModelPart, add_routes, hold_bytes, model_part, probe_app, shield
from penstock.server.delivery.observation import Observer
from penstock.server.http.access import Access
from penstock.server.http.body import read_json
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import json_response
from penstock.server.http.held_requests import HoldRequests
from penstock.server.http.known_refusals import KnownRefusals
from penstock.server.http.lifecycle import Lifecycle, set_lifecycle
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route
from penstock.server.many import health
from penstock.server.many import models as model_routes
from penstock.server.many.dispatch import Dispatch, Parts
from penstock.server.many.metrics import ManyMetrics
from penstock.server.many.relay import RelayedClient, RelayedWatch
from penstock.server.page import files
from penstock.server.page.files import is_page_path

__all__ = ["create_many_app"]


def create_many_app(
    models: Models,
    around: AbstractAsyncContextManager[None],
    limits: RequestLimits,
    access: Access,
    memory: MemoryBudget,
    observers: Sequence[Observer] = (),
) -> FastAPI:
    """The application that serves `models`.

    Args:
        models: loaded or not.
        around: entered when the server begins to serve, before it answers, and left when it ends.
        limits: limits on requests.
        access: who may call.
        memory: the budget of requests in progress, of all models together.
        observers: called when a request is over.
    """
    stopping, counter = asyncio.Event(), RequestCounter()

    def make(name: str, model: ServedModel) -> ModelPart:
        own = replace(access, limits=model.memory.applied(access.limits))
        client, watch = RelayedClient(models, name, model), RelayedWatch(models, name)
        return model_part(client, model.card, limits, own, model.memory, watch, stopping)

    parts = Parts(models, make)
    probes = (*health.routes(parts, stopping), *metrics_route(ManyMetrics(parts, counter)))
    listed = model_routes.routes(models, limits, int(time.time()))
    routes = (*listed, *_for_all(parts, limits), *about.ROUTES, *files.routes(), *probes)
    app = FastAPI(
        title="Penstock", version="1", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.lifespan_context = partial(_while_serving, around, parts)
    own = {route.path for route in routes}
    app.add_middleware(
        Dispatch,
        parts=parts,
        is_own=lambda path: path in own or is_page_path(path) or path.startswith("/v1/models/"),
        max_body_bytes=limits.max_body_bytes,
    )
    app.add_middleware(HoldRequests, held=hold_bytes(memory, access), max_body_bytes=limits.max_body_bytes)
    shield(app, limits, access, stopping, (counter, *observers))
    add_routes(app, routes)
    known = KnownRefusals(lambda _: None, stopping)
    stuck = partial(health.stuck, parts)
    set_lifecycle(app, Lifecycle(stopping, probe_app(probes, access), stuck, counter.refused, known))
    return app


@asynccontextmanager
async def _while_serving(around: AbstractAsyncContextManager[None], parts: Parts, _: FastAPI) -> AsyncGenerator[None]:
    async with around:
        yield
        await parts.close()


def _for_all(parts: Parts, limits: RequestLimits) -> tuple[Route, ...]:
    """Endpoints that concern every model at once."""
    extra = request_body(ABORT_FIELDS, {}, "request_ids")

    async def abort_requests(http_request: Request) -> Response:
        """End answers that are being generated, of any model; says which of the ids were."""
        ids = parse_abort(await read_json(http_request, limits.max_body_bytes), limits)
        caller = caller_of(http_request.scope)
        tenant, aborted = "" if caller.admin else caller.name, []
        for each in ids:
            found = [await part.serving.live.abort_response(each, tenant) for part in parts.present()]
            aborted += [each] * any(found)
        return json_response(200, {"aborted": aborted})

    async def reset_prefix_cache() -> Response:
        """Forget all cached KV of the loaded models; running requests keep theirs."""
        for part in parts.present():
            await part.serving.client.reset_prefix_cache()
        return json_response(200, {"reset": True})

    async def stats() -> Response:
        """Sequences so far, tokens generated, sequences running and waiting, of all models together."""
        clients = [part.serving.client for part in parts.present()]
        each, measured = [client.health() for client in clients], [client.measurements() for client in clients]
        active, waiting = sum(one.running for one in each), sum(one.waiting for one in each)
        body: JsonObject = {
            "total_tasks": sum(count for one in measured for _, count in one.finished) + active + waiting,
            "total_tokens": sum(one.generated_tokens for one in each),
            "active_tasks": active,
            "waiting_queue": waiting,
        }
        return json_response(200, body)

    return (
        Route("POST", "/abort_requests", abort_requests, answers("Aborted"), extra),
        Route("POST", "/reset_prefix_cache", reset_prefix_cache, answers("Reset", 401, 403, 503)),
        Route("GET", "/stats", stats, answers("Stats", 401)),
    )
