"""One endpoint as a value: every room lists its own, and the application puts all of them on paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Response

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
        head: whether HEAD is answered beside GET.
    """

    method: str
    path: str
    handler: Handler
    answers: Mapping[int | str, dict[str, Any]] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    documented: bool = True
    head: bool = False


def add_route(app: FastAPI, route: Route) -> None:
    """Put one endpoint on `app`."""
    app.add_api_route(
        route.path,
        route.handler,
        methods=[route.method, "HEAD"] if route.head else [route.method],
        responses=dict(route.answers),
        openapi_extra=dict(route.body) if route.body is not None else None,
        include_in_schema=route.documented,
        response_class=Response,
    )
