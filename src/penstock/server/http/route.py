"""An endpoint as a value: each package lists its own, and the application registers all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import Message, Receive, Scope, Send

from penstock.server.http.connection import ClientLeft

__all__ = ["Handler", "Route", "add_route"]

Handler = Callable[..., Awaitable[Response]]
"""Answers a request. FastAPI fills its parameters: the `Request`, and the path's captures. Its name and docstring
become the endpoint's in the OpenAPI document."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint.

    Attributes:
        method: GET, POST or DELETE.
        path: with captures in braces, such as `/v1/responses/{response_id}`.
        handler: answers its requests.
        answers: its responses in the OpenAPI document, by status; see `openapi.answers`.
        body: its request body in the document; see `openapi.request_body`.
        documented: whether the document includes the endpoint.
        queued: whether each of its requests waits in the engine's queue, so that a full queue refuses them unread.

    Every GET endpoint also takes HEAD, with the same status and headers and no body (RFC 9110, section 9.3.2).
    """

    method: str
    path: str
    handler: Handler
    answers: Mapping[int | str, dict[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    documented: bool = True
    queued: bool = False


def add_route(app: FastAPI, route: Route) -> None:
    """Register an endpoint on `app`."""
    app.add_api_route(
        route.path,
        route.handler,
        methods=[route.method],
        responses=dict(route.answers),
        openapi_extra=dict(route.body) if route.body is not None else None,
        include_in_schema=route.documented,
        response_class=Response,
    )
    if route.method == "GET":
        app.add_api_route(route.path, _headers_of(route.handler), methods=["HEAD"], include_in_schema=False)


def _headers_of(handler: Handler) -> Handler:
    """Wrap `handler` to answer with the status and headers of its response only."""

    @wraps(handler)
    async def headers(*args: Any, **kwargs: Any) -> Response:
        return _HeadersOf(await handler(*args, **kwargs))

    return headers


class _HeadersOf(Response):
    """Another response without its body. A stream is ended as if its client had disconnected."""

    def __init__(self, whole: Response) -> None:
        self._whole = whole
        self.status_code = whole.status_code
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.body":
                raise ClientLeft
            await send(message)

        with suppress(ClientLeft):
            await self._whole(scope, receive, send_headers)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
