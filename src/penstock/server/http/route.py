"""One endpoint as a value: every room lists its own, and the application puts all of them on paths."""

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
"""Answers a request. Its parameters are those that FastAPI fills: the `Request`, and what the path captures. Its name
and docstring are the endpoint's in the OpenAPI document."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint.

    Attributes:
        method: GET, POST or DELETE.
        path: with captures in braces, such as `/v1/responses/{response_id}`.
        handler: answers its requests.
        answers: what the OpenAPI document says of the answers, by status; see `openapi.answers`.
        body: what it says of the request's body; see `openapi.request_body`.
        documented: whether the document has the endpoint at all.
        queued: whether each of its requests waits in the engine's queue, so that a full queue refuses them unread.

    Wherever there is GET there is HEAD, with the same status and headers and no body (RFC 9110, section 9.3.2).
    """

    method: str
    path: str
    handler: Handler
    answers: Mapping[int | str, dict[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    documented: bool = True
    queued: bool = False


def add_route(app: FastAPI, route: Route) -> None:
    """Put one endpoint on `app`."""
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
    """Answers with the status and the headers of what `handler` answers."""

    @wraps(handler)
    async def headers(*args: Any, **kwargs: Any) -> Response:
        return _HeadersOf(await handler(*args, **kwargs))

    return headers


class _HeadersOf(Response):
    """Another answer without its body. Where that would stream, it is left as by a client that has seen enough."""

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
