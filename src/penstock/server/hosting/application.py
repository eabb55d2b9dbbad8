"""The HTTP application of a server of several models.

Its own endpoints concern all models: lists, probes, metrics, the page. Every other request goes to the part of the
model that it names, which has the endpoints of a server of one model (`server.application`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI

from penstock.contract.hosting import Models, ServedModel
from penstock.contract.journal import AnswerJournal
from penstock.contract.limits import RequestLimits
from penstock.contract.memory_budget import MemoryBudget
from penstock.server.admin import common_routes, metrics
from penstock.server.admin.latency import RecentLatencies
from penstock.server.admin.metrics import RequestCounter, ServerMetrics
from penstock.server.admin.probes import routes as probe_routes
from penstock.server.application import ModelPart, add_routes, hold_bytes, model_part, probe_app, shield
from penstock.server.delivery.observation import Observer
from penstock.server.hosting import events
from penstock.server.hosting import models as model_routes
from penstock.server.hosting.dispatch import Dispatch, Parts
from penstock.server.hosting.health import HostingReadiness, health_of
from penstock.server.hosting.metrics import HostingMetrics
from penstock.server.hosting.relay import RelayedClient, RelayedWatch
from penstock.server.http.access import Access
from penstock.server.http.held_requests import HoldRequests
from penstock.server.http.known_refusals import KnownRefusals
from penstock.server.http.lifecycle import Lifecycle, set_lifecycle
from penstock.server.page import files
from penstock.server.page.files import is_page_path

__all__ = ["create_hosting_app"]


def create_hosting_app(
    models: Models,
    around: AbstractAsyncContextManager[None],
    limits: RequestLimits,
    access: Access,
    memory: MemoryBudget,
    observers: Sequence[Observer] = (),
    journals: Mapping[str, AnswerJournal] | None = None,
) -> FastAPI:
    """The application that serves `models`.

    Args:
        models: the models, loaded or not.
        around: entered when the server begins to serve, before it answers, and left when it ends.
        limits: limits on requests.
        access: who may call.
        memory: the budget of requests in progress, for all models together.
        observers: called when a request is over.
        journals: the journal of each model's stored answers, by the model's main name; None if there are none.
    """
    stopping, counter, recent = asyncio.Event(), RequestCounter(), RecentLatencies()

    def make(name: str, model: ServedModel) -> ModelPart:
        own = replace(access, limits=model.memory.applied(access.limits))
        client, watch = RelayedClient(models, name, model), RelayedWatch(models, name)
        kept = model.streams, model.answers
        return model_part(client, model.card, limits, own, model.memory, watch, stopping, *kept, recent)

    parts = Parts(models, make, journals)
    readiness = HostingReadiness(parts, stopping)
    measured = HostingMetrics(parts), ServerMetrics(counter)
    probes = (*probe_routes(partial(health_of, parts), readiness), *metrics.routes(*measured))
    listed = model_routes.routes(parts, limits, access, int(time.time()))
    common = common_routes(
        limits,
        access,
        lambda: [part.serving.client for part in parts.present()],
        lambda: [part.serving.live for part in parts.present()],
        recent,
    )
    routes = (*listed, *common, *files.routes(), *events.routes(parts, access, stopping), *probes)
    app = FastAPI(
        title="Penstock", version="1", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.router.lifespan_context = partial(_while_serving, around, parts)
    own = {route.path for route in routes}
    app.add_middleware(
        Dispatch,
        parts=parts,
        is_own=lambda path: path in own or is_page_path(path) or path.startswith(("/v1/models/", "/v1/requests/")),
        max_body_bytes=limits.max_body_bytes,
    )
    app.add_middleware(HoldRequests, held=hold_bytes(memory, access), max_body_bytes=limits.max_body_bytes)
    shield(app, limits, access, stopping, (counter, recent, *observers))
    add_routes(app, routes)
    known = KnownRefusals(lambda _: None, stopping)
    set_lifecycle(app, Lifecycle(stopping, probe_app(routes, access), readiness.stuck, counter.refused, known))
    return app


@asynccontextmanager
async def _while_serving(around: AbstractAsyncContextManager[None], parts: Parts, _: FastAPI) -> AsyncGenerator[None]:
    async with around:
        yield
        await parts.close()
