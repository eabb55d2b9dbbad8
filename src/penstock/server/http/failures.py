"""Errors on the wire: which status, which OpenAI error object, which headers.

Maps the error tree in `contract.errors` to HTTP, and tells the official clients whether to retry (`x-should-retry`,
`Retry-After`).
Invariant: every error body is `{"error": {"message", "type", "param", "code"}}`, and contains no path, stack or user
text beyond a field's name.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api_fields.strict_json import JsonObject, encode
from penstock.contract.errors import (
    EngineDead,
    EngineFault,
    Overloaded,
    PenstockError,
    RefusalCause,
    RequestError,
    RequestPoisoned,
    Unavailable,
    UnknownModel,
)

__all__ = [
    "BodyTooLarge",
    "BodyTooSlow",
    "ErrorResponse",
    "HttpRefusal",
    "RequestTimedOut",
    "ShuttingDown",
    "UnsupportedMediaType",
    "error_object",
    "error_response",
    "http_error_response",
    "json_response",
    "log_failure",
    "note_refusal",
    "refused_for",
]

logger = logging.getLogger("penstock.server")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
INTERNAL = "The server failed to answer this request."
NO_RETRY = {"x-should-retry": "false"}
REFUSED = "penstock.refused"

ROUTING_CODES = {404: "unknown_url", 405: "method_not_allowed"}


class BodyTooLarge(RequestError):
    """The body has more bytes than `RequestLimits.max_body_bytes`."""

    cause = RefusalCause.BODY

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes.", code="request_too_large")


class BodyTooSlow(RequestError):
    """The body did not arrive in time."""

    cause = RefusalCause.BODY

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request body did not arrive within {seconds:g} seconds.", code="request_timeout")


class UnsupportedMediaType(RequestError):
    """The body is not declared to be JSON."""

    def __init__(self) -> None:
        super().__init__("The Content-Type must be application/json (in UTF-8).", code="unsupported_media_type")


class HttpRefusal(RequestError):
    """A refusal with a status of its own, because it concerns HTTP rather than a field.

    Attributes:
        status: the HTTP status.
        kind: OpenAI's error type.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str = INVALID_REQUEST,
        param: str = "",
        cause: RefusalCause | None = None,
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status
        self.kind = kind
        self.cause = cause


class RequestTimedOut(EngineFault):
    """The request took longer than this server, or its caller, allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request was ended after {seconds:g} seconds, the most that it may take.")


class ShuttingDown(Overloaded):
    """The server is shutting down; another server, or this one after a restart, may answer."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", retry_after=5, cause=RefusalCause.DRAINING)


class ErrorResponse(Response):
    """The complete response to a failed request; if it was refused, notes the cause in the ASGI scope."""

    def __init__(self, error: Exception, content: bytes, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(content, status, headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        note_refusal(scope, self._error)
        await super().__call__(scope, receive, send)


def note_refusal(scope: Scope, error: Exception) -> None:
    """Note the cause of a refusal in the request's ASGI scope, for observers; ignore other errors."""
    if isinstance(error, PenstockError) and error.cause is not None:
        scope[REFUSED] = error.cause


def refused_for(scope: Scope) -> RefusalCause | None:
    """Why a request was refused; None if it was not."""
    cause: RefusalCause | None = scope.get(REFUSED)
    return cause


def json_response(status: int, value: JsonObject, headers: Mapping[str, str] | None = None) -> Response:
    """A complete JSON response."""
    return Response(encode(value), status, dict(headers or {}), media_type="application/json")


def error_object(error: Exception, aliases: Mapping[str, str] | None = None) -> JsonObject:
    """The OpenAI error object of `error`; `aliases` renames parameters to the names that the caller used."""
    _, kind, code = _classify(error)
    named = error.param if isinstance(error, RequestError) else ""
    param = (aliases or {}).get(named, named)
    message = str(error) if isinstance(error, PenstockError) and str(error) else INTERNAL
    if param != named and message.startswith(f"{named}:"):
        message = param + message.removeprefix(named)
    if param and param not in message:
        message = f"{param}: {message}"
    return _envelope(message, kind, param, code)


def error_response(error: Exception, aliases: Mapping[str, str] | None = None) -> ErrorResponse:
    """The complete HTTP response for `error`; anything but a `PenstockError` becomes a 500 without details."""
    status, _, _ = _classify(error)
    return ErrorResponse(error, encode(error_object(error, aliases)), status, _headers(error, status))


def http_error_response(status: int, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a routing failure: unknown path, or method not allowed."""
    allowed = (headers or {}).get("Allow", "")
    missing = f"this endpoint takes {allowed}" if allowed else "there is no such endpoint here"
    message = f"{HTTPStatus(status).phrase}: {missing}; see /openapi.json."
    envelope = _envelope(message, INVALID_REQUEST, "", ROUTING_CODES.get(status, "invalid_request"))
    return json_response(status, envelope, {**(headers or {}), **NO_RETRY})


def log_failure(error: Exception, request: str) -> None:
    """Log where an internal failure happened, without its message, which may contain a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s at\n%s", request, type(error).__name__, frames)


def _envelope(message: str, kind: str, param: str, code: str) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code}}


def _classify(error: Exception) -> tuple[int, str, str]:
    """Status, OpenAI type and code; the first matching branch decides, so subclasses come first."""
    statuses: tuple[tuple[type[RequestError], int], ...] = (
        (UnknownModel, 404),
        (BodyTooLarge, 413),
        (BodyTooSlow, 408),
        (UnsupportedMediaType, 415),
        (RequestError, 400),
    )
    if isinstance(error, HttpRefusal):
        return error.status, error.kind, error.code
    for kind, status in statuses:
        if isinstance(error, kind):
            return status, INVALID_REQUEST, error.code
    if isinstance(error, ShuttingDown):
        return 503, SERVER_ERROR, "shutting_down"
    if isinstance(error, RequestTimedOut):
        return 504, SERVER_ERROR, "request_timeout"
    if isinstance(error, Unavailable):
        return 503, SERVER_ERROR, "unavailable"
    if isinstance(error, Overloaded):
        return 429, "rate_limit_error", "overloaded"
    if isinstance(error, EngineDead):
        return 503, SERVER_ERROR, "engine_dead"
    if isinstance(error, RequestPoisoned):
        return 500, SERVER_ERROR, "request_poisoned"
    return 500, SERVER_ERROR, "internal_error"


def _headers(error: Exception, status: int) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, error.retry_after))}
    if status == BODY_TIMEOUT:
        return {"connection": "close"}
    if status == TOO_LARGE:
        # The rest of the body stays unread, so this connection cannot carry another request.
        return {**NO_RETRY, "connection": "close"}
    return NO_RETRY


BODY_TIMEOUT = 408
TOO_LARGE = 413
