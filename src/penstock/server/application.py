"""The HTTP application: every package's endpoints on their paths, and the middleware around them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
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
from penstock.server.admin.metrics import RequestCounter
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

__all__ = ["create_app"]

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
        journal: where streams are recorded, so that they can be resumed after the end of this server.
        answers: where stored answers are recorded, so that they survive it too.
        memory: the budget of stores and of requests in progress. Without it stores keep to the limits in `access`.

    Raises:
        ConfigError: the stored answers cannot be read.
    """
    access, memory = _within(access or Access(), memory)
    live = LiveRequests(client, access.request_seconds)
    streams = Streams(access.limits.max_resumable_streams, journal)
    memory.watch("resumable_streams", lambda: streams.bytes)
    serving = Serving(client, live, card, limits, access, streams, memory, answers)
    held = HeldBytes(memory.requests, memory.requests // 2 if access.keys else memory.requests, memory.on_rest)
    memory.watch("requests", lambda: held.bytes)
    counter = RequestCounter()
    readiness = Readiness(client, watch or NoWatch(), access.limits.heartbeat_seconds, serving.stopping)
    probes = admin.probe_routes(serving, counter, readiness)
    app = FastAPI(title="Penstock", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.lifespan_context = partial(_while_serving, serving)
    routes = (*_routes(serving), *probes)
    # The middleware that is added last is outermost.
    app.add_middleware(HoldRequests, held=held, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(
        RefuseWhenFull,
        check=client.check_queue,
        routes=routes,
        resumes=STREAM_POSITION,
        max_body_bytes=limits.max_body_bytes,
    )
    app.add_middleware(RefuseNewWork, stopping=serving.stopping, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(Guard, access=access, is_public=is_page_path)
    app.add_middleware(Envelope)
    app.add_middleware(AnthropicErrors)  # outside the guard, so that its refusals are rewritten too
    app.add_middleware(Observe, observers=(counter, *observers))  # sees every answer
    _add_routes(app, routes)
    known = KnownRefusals(client.check_queue, serving.stopping)
    set_lifecycle(app, Lifecycle(serving.stopping, _probe_app(probes, access), readiness.stuck, counter.refused, known))
    app.openapi = partial(_openapi, app.openapi)  # type: ignore[method-assign]
    return app


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


def _probe_app(probes: Iterable[Route], access: Access) -> FastAPI:
    """The application on the probe port: only the probe routes, without a key."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, access=replace(access, keys=ApiKeys(), hosts=access.probe_hosts), is_public=is_page_path)
    app.add_middleware(Envelope)
    _add_routes(app, probes)
    return app


def _routes(serving: Serving) -> Iterator[Route]:
    yield from openai.routes(serving)
    yield from anthropic.routes(serving)
    yield from tokens.routes(serving)
    yield from admin.routes(serving)
    yield from page.routes(serving)


def _add_routes(app: FastAPI, routes: Iterable[Route]) -> None:
    app.add_exception_handler(PenstockError, _penstock_error)
    app.add_exception_handler(HTTPException, _http_error)
    for route in routes:
        add_route(app, route)


def _openapi(original: Callable[[], JsonObject]) -> JsonObject:
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
