"""The HTTP application: routes, and the two things around every request (its id, and errors as OpenAI's objects).

Decides which paths exist. Each generating route is the same three steps: read the body, parse it to an
`Exchange`, answer with an `EngineResponse`. Knows the engine through `EngineClient` only.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import EngineDead, PenstockError, UnknownModel
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.ports import EngineClient
from penstock.server import (
    abort,
    about,
    apply_template,
    detokenize,
    embeddings,
    messages,
    prefix_cache,
    probes,
    responses,
    tokenize,
)
from penstock.server.access import Access
from penstock.server.anthropic_errors import AnthropicErrors
from penstock.server.chat import CHAT_FIELDS, ChatShape, parse_chat
from penstock.server.compat import EXTRA_HEADERS
from penstock.server.completions import COMPLETION_FIELDS, CompletionShape, parse_completion
from penstock.server.connection import ClientLeft
from penstock.server.delivery import (
    Delivery,
    EngineResponse,
    EventDelivery,
    Shape,
    TextDelivery,
    WholeDelivery,
    WholeShape,
    log_failure,
)
from penstock.server.engine_events import add_engine_events
from penstock.server.exchange import Exchange
from penstock.server.failures import error_object, error_response, http_error_response, json_response
from penstock.server.fields import NEUTRAL_CHAT, NEUTRAL_COMPLETION, NEUTRAL_GENERATE
from penstock.server.fitted_fields import fitted
from penstock.server.generate import GENERATE_FIELDS, GenerateShape, parse_generate
from penstock.server.guard import Guard
from penstock.server.live_asks import LiveAsks
from penstock.server.metrics import add_metrics_route
from penstock.server.observation import Observe, Observer
from penstock.server.openapi import COMPONENTS, answers, request_body
from penstock.server.page_files import add_page
from penstock.server.sampling_controls import add_sampling_controls
from penstock.server.serving import Parse, Serving
from penstock.server.strict_json import JsonObject, printable

__all__ = ["create_app"]

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create_app(
    client: EngineClient,
    card: ModelCard,
    limits: RequestLimits,
    access: Access | None = None,
    observers: Sequence[Observer] = (),
) -> FastAPI:
    """The application that serves `client`'s engine under `card`'s name. Starts and stops nothing.

    Args:
        client: the engine.
        card: what it says of itself.
        limits: on requests.
        access: who may call; by default anybody on this machine.
        observers: told of every request when it is over; the log and spans, where wanted.
    """
    access = access or Access()
    serving = Serving(LiveAsks(client, access.request_seconds), card, limits, access)
    app = FastAPI(title="Penstock", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Guard, access=access)
    app.add_middleware(_Envelope)
    app.add_middleware(AnthropicErrors)  # around the guard: its refusals are told alike
    app.add_exception_handler(PenstockError, _penstock_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_generating_routes(app, serving)
    _add_describing_routes(app, client, card)
    for room in (embeddings, tokenize, detokenize, apply_template, probes, abort, prefix_cache, messages, responses):
        room.add_routes(app, serving)
    about.add_routes(app)
    add_sampling_controls(app)
    add_engine_events(app, client)
    add_page(app)
    requests = add_metrics_route(app, client, card)
    app.add_middleware(Observe, observers=(requests, *observers))  # last added is outermost: it sees every answer
    original = app.openapi
    app.openapi = partial(_openapi, original)  # type: ignore[method-assign]
    return app


def _add_generating_routes(app: FastAPI, serving: Serving) -> None:
    client, card = serving.client, serving.card

    async def exchange(request: Request, prefix: str, parse: Parse) -> Exchange:
        return await serving.exchange(request, prefix, parse)

    chat_extra = request_body(fitted(CHAT_FIELDS, serving.card), NEUTRAL_CHAT, "messages")
    chat_answers = answers("ChatCompletion", stream="text/event-stream")

    @app.post("/v1/chat/completions", openapi_extra=chat_extra, responses=chat_answers, response_class=Response)
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation, as OpenAI's endpoint of this name."""
        parsed = await exchange(request, "chatcmpl-", parse_chat)
        return EngineResponse(client, parsed, _delivery(parsed, ChatShape(*_head(parsed, card))))

    completion_extra = request_body(fitted(COMPLETION_FIELDS, serving.card), NEUTRAL_COMPLETION, "prompt")
    completion_answers = answers("Completion", stream="text/event-stream")

    @app.post("/v1/completions", openapi_extra=completion_extra, responses=completion_answers, response_class=Response)
    async def completions(request: Request) -> Response:
        """Continue text or token ids, as OpenAI's endpoint of this name."""
        parsed = await exchange(request, "cmpl-", parse_completion)
        return EngineResponse(client, parsed, _delivery(parsed, CompletionShape(*_head(parsed, card))))

    generate_extra = request_body(fitted(GENERATE_FIELDS, serving.card), NEUTRAL_GENERATE, "prompt")
    generate_answers = answers("Generated", stream="text/plain")

    @app.post("/generate", openapi_extra=generate_extra, responses=generate_answers, response_class=Response)
    async def generate(request: Request) -> Response:
        """Continue a prompt; the simple endpoint, plain text when streamed."""
        parsed = await exchange(request, "gen-", parse_generate)
        delivery: Delivery = TextDelivery() if parsed.stream else _whole(parsed, GenerateShape())
        return EngineResponse(client, parsed, delivery)


def _head(exchange: Exchange, card: ModelCard) -> tuple[str, str, int, bool]:
    return exchange.id, card.name, int(time.time()), exchange.asks[0].sampling.has("logprobs")


def _delivery(exchange: Exchange, shape: Shape) -> Delivery:
    if exchange.stream:
        return EventDelivery(shape, exchange.include_usage, exchange.timings)
    return _whole(exchange, shape)


def _whole(exchange: Exchange, shape: WholeShape) -> WholeDelivery:
    return WholeDelivery(shape, exchange.num_choices, exchange.timings, exchange.prompt_logprobs)


def _add_describing_routes(app: FastAPI, client: EngineClient, card: ModelCard) -> None:
    model = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "penstock",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }

    @app.get("/v1/models", responses=answers("ModelList", 500), response_class=Response)
    async def list_models() -> Response:
        """The one served model, as a list."""
        return json_response(200, {"object": "list", "data": [model]})

    @app.get("/v1/models/{model_id:path}", responses=answers("Model", 404), response_class=Response)
    async def retrieve_model(model_id: str) -> Response:
        """The served model, by name; names may hold slashes."""
        if model_id != card.name:
            raise UnknownModel(printable(model_id), card.name)
        return json_response(200, model)

    @app.get("/health", responses=answers("Health", 503), response_class=Response)
    async def health() -> Response:
        """Whether the engine is alive, and what it is doing."""
        return _health(client)


def _health(client: EngineClient) -> Response:
    health = client.health()
    body: dict[str, Any] = {
        "status": "ok" if health.alive else "dead",
        "reason": health.reason,
        "running": health.running,
        "waiting": health.waiting,
        "free_blocks": health.free_blocks,
        "total_blocks": health.total_blocks,
        "steps": health.steps,
    }
    if health.alive:
        return json_response(200, body)
    return json_response(503, body | error_object(EngineDead(f"The engine is dead: {health.reason}")))


def _openapi(original: Callable[[], JsonObject]) -> JsonObject:
    document = original()
    document["components"] = {"schemas": COMPONENTS}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # the framework's own; no request here is ever answered so
    return document


async def _penstock_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _http_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return http_error_response(error.status_code, error.headers)


class _Envelope:
    """Around every request: its id goes into the answer, and what nothing else caught becomes a 500 of our shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else f"req-{secrets.token_hex(16)}"
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update({"x-request-id": request_id, **scope.get(EXTRA_HEADERS, {})})
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientLeft:
            return
        except Exception as error:
            log_failure(error, request_id)
            if started:
                return  # an answer cut short: the server closes the connection, so it cannot be taken for complete
            await error_response(error)(scope, receive, send_with_id)
