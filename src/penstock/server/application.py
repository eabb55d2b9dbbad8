"""The HTTP application: every package's endpoints on their paths, and the middleware around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.routing import Route as AppRoute

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import PenstockError
from penstock.contract.journal import AnswerJournal, Journal
from penstock.contract.limits import RequestLimits
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import ModelCard
from penstock.contract.ports import EngineClient, StepWatch
from penstock.server import admin, anthropic, openai, page, tokens
from penstock.server.admin import metrics
from penstock.server.admin.latency import RecentLatencies
from penstock.server.admin.metrics import EngineMetrics, RequestCounter, ServerMetrics
from penstock.server.admin.probes import routes as probe_routes
from penstock.server.admin.readiness import NoWatch, Readiness
from penstock.server.anthropic.errors import AnthropicErrors
from penstock.server.delivery.event_ids import HEADER as STREAM_POSITION
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.observation import Observe, Observer
from penstock.server.delivery.serving import Serving
from penstock.server.delivery.streams import Streams
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.drain import RefuseNewWork
from penstock.server.http.envelope import Envelope
from penstock.server.http.failures import error_response, http_error_response
from penstock.server.http.full_queue import RefuseWhenFull
from penstock.server.http.guard import Guard
from penstock.server.http.held_requests import HeldBytes, HoldRequests
from penstock.server.http.known_refusals import KnownRefusals
from penstock.server.http.lifecycle import Lifecycle, set_lifecycle
from penstock.server.http.openapi import SHARED_SCHEMAS
from penstock.server.http.route import Route, add_route
from penstock.server.page.files import is_page_path

__all__ = [
    "ModelPart",
    "add_routes",
    "create_app",
    "hold_bytes",
    "model_part",
    "openapi_of",
    "probe_app",
    "shield",
]

PROBES = ("/health", "/health/live", "/health/ready", "/metrics", "/v1/models")
"""What the probe port answers. Kubernetes gateways read the list of models to see whether they are loaded."""

SCHEMAS: JsonObject = (
    SHARED_SCHEMAS | openai.SCHEMAS | anthropic.SCHEMAS | tokens.SCHEMAS | admin.SCHEMAS | page.SCHEMAS
)
"""Component name -> JSON schema, of the whole OpenAPI document."""


def create_app(
    client: EngineClient,
    card: ModelCard,
    limits: RequestLimits,
    access: Access | None = None,
    observers: Sequence[Observer] = (),
    watch: StepWatch | None = None,
    journal: Journal | None = None,
    answers: AnswerJournal | None = None,
    memory: MemoryBudget | None = None,
) -> FastAPI:
    """The application that serves `client`'s engine under `card`'s name. Starts and stops nothing.

    Args:
        client: the engine.
        card: the engine's description of the served model.
        limits: limits on requests.
        access: who may call; by default anybody on this machine.
        observers: called when a request is over: the log and spans, if wanted.
        watch: knows how long the current step has taken; None if nobody watches.
        journal: where streams are recorded, so that they can be resumed after this server has ended.
        answers: where stored answers are recorded, so that they survive the end of this server.
        memory: the budget of stores and of requests in progress. Without it stores keep to the limits in `access`.

    Raises:
        ConfigError: the stored answers cannot be read.
    """
    access, memory = _within(access or Access(), memory)
    counter, recent, stopping = RequestCounter(), RecentLatencies(), asyncio.Event()
    serving = _serve(client, card, limits, access, memory, stopping, journal, answers)
    readiness = Readiness(client, watch or NoWatch(), access.limits.heartbeat_seconds, stopping)
    measured = EngineMetrics(client, card.name, memory), ServerMetrics(counter, card.name)
    probes = (*probe_routes(client.health, readiness), *metrics.routes(*measured))
    routes = tuple(_routes(serving, recent))
    app = _application(serving, (*routes, *probes), held=hold_bytes(memory, access))
    shield(app, limits, access, stopping, (counter, recent, *observers))
    known = KnownRefusals(client.check_queue, stopping)
    set_lifecycle(
        app, Lifecycle(stopping, probe_app((*probes, *routes), access), readiness.stuck, counter.refused, known)
    )
    return app


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One model's part of a server of several: its endpoints, without the middleware that all models share.

    Attributes:
        app: answers requests that have passed admission, and whose bodies are bounded.
        serving: the model as its endpoints see it.
        stuck: returns why its engine does not respond; "" while it does.
    """

    app: FastAPI
    serving: Serving
    stuck: Callable[[], Awaitable[str]]


def model_part(
    client: EngineClient,
    card: ModelCard,
    limits: RequestLimits,
    access: Access,
    memory: MemoryBudget,
    watch: StepWatch,
    stopping: asyncio.Event,
    journal: Journal | None,
    answers: AnswerJournal | None,
    recent: RecentLatencies,
) -> ModelPart:
    """Make one model's part of a server of several: as `create_app`, but with the server's `stopping` and `recent`."""
    serving = _serve(client, card, limits, access, memory, stopping, journal, answers)
    readiness = Readiness(client, watch, access.limits.heartbeat_seconds, stopping)
    routes = tuple(_routes(serving, recent))
    return ModelPart(_application(serving, routes), serving, readiness.stuck)


def _serve(
    client: EngineClient,
    card: ModelCard,
    limits: RequestLimits,
    access: Access,
    memory: MemoryBudget,
    stopping: asyncio.Event,
    journal: Journal | None = None,
    answers: AnswerJournal | None = None,
) -> Serving:
    """Make the `Serving` that the endpoints of one model get."""
    live = LiveRequests(client, access.request_seconds)
    streams = Streams(access.limits.max_resumable_streams, journal)
    memory.watch("resumable_streams", lambda: streams.bytes)
    return Serving(client, live, card, limits, access, streams, memory, answers, stopping)


def _application(serving: Serving, routes: Sequence[Route], held: HeldBytes | None = None) -> FastAPI:
    """An application with these routes; with `held` it bounds the memory of its requests."""
    limits = serving.limits
    app = FastAPI(title="Penstock", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.lifespan_context = partial(_while_serving, serving)
    # The middleware that is added last is outermost.
    if held is not None:
        app.add_middleware(HoldRequests, held=held, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(
        RefuseWhenFull,
        check=serving.client.check_queue,
        routes=routes,
        resumes=STREAM_POSITION,
        max_body_bytes=limits.max_body_bytes,
    )
    add_routes(app, routes)
    app.openapi = partial(openapi_of, app.openapi)  # type: ignore[method-assign]
    return app


def shield(
    app: FastAPI, limits: RequestLimits, access: Access, stopping: asyncio.Event, observers: Sequence[Observer]
) -> None:
    """Add the middleware that every request passes first: admission, request ids, observers."""
    app.add_middleware(RefuseNewWork, stopping=stopping, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(Guard, access=access, is_public=is_page_path)
    app.add_middleware(Envelope)
    app.add_middleware(AnthropicErrors)  # outside the guard, so that its refusals are rewritten too
    app.add_middleware(Observe, observers=observers)  # sees every answer


def hold_bytes(memory: MemoryBudget, access: Access) -> HeldBytes:
    """The counter of a server's request bodies, with the budget's share for requests; one key may take half of it."""
    held = HeldBytes(memory.requests, memory.requests // 2 if access.keys else memory.requests, memory.on_rest)
    memory.watch("requests", lambda: held.bytes)
    return held


def _within(access: Access, memory: MemoryBudget | None) -> tuple[Access, MemoryBudget]:
    """The rules with a budget's limits applied, and the budget; without one, the same rules and a default budget."""
    if memory is None:
        return access, MemoryBudget()
    return replace(access, limits=memory.applied(access.limits)), memory


@asynccontextmanager
async def _while_serving(serving: Serving, _: FastAPI) -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as around:
        for enter in serving.around:
            await around.enter_async_context(enter())
        yield


def probe_app(routes: Iterable[Route], access: Access) -> FastAPI:
    """The application on the probe port: those of a server's routes that are in `PROBES`; they need no key there."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, access=replace(access, keys=ApiKeys(), hosts=access.probe_hosts), is_public=is_page_path)
    app.add_middleware(Envelope)
    add_routes(app, [route for route in routes if route.method == "GET" and route.path in PROBES])
    return app


def _routes(serving: Serving, recent: RecentLatencies) -> Iterator[Route]:
    yield from openai.routes(serving)
    yield from anthropic.routes(serving)
    yield from tokens.routes(serving)
    yield from admin.routes(serving, recent)
    yield from page.routes(serving)


def add_routes(app: FastAPI, routes: Iterable[Route]) -> None:
    """Register endpoints on an application, and how their errors are answered."""
    app.add_exception_handler(PenstockError, _penstock_error)
    app.add_exception_handler(HTTPException, _http_error)
    for route in routes:
        add_route(app, route)


def openapi_of(original: Callable[[], JsonObject]) -> JsonObject:
    """An application's OpenAPI document: the framework's, with the schemas of all endpoints."""
    document = original()
    document["components"] = {"schemas": SCHEMAS}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # the framework's own; no request here is answered with it
    return document


async def _penstock_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    if "Allow" in headers:  # lists only the first endpoint on this path: there may be several
        headers["Allow"] = ", ".join(_methods(request))
    return http_error_response(error.status_code, headers)


def _methods(request: Request) -> list[str]:
    """The methods that the request's path takes."""
    app: FastAPI = request.app
    routes = (route for route in app.routes if isinstance(route, AppRoute))
    found = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in found for method in route.methods or ()})
