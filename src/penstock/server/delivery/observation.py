"""Observe requests: when one is over, its record goes to every observer (a counter, the log, spans).

Observers are called on the event loop, so they must be quick. Of a caller's text they may write only a checked request
id and, in spans, its `user` and labels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import Overloaded, RefusalCause
from penstock.contract.measurements import NO_PARTS, LatencyParts
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.failures import refused_for
from penstock.server.http.known_refusals import refused_unread

__all__ = ["Account", "Observe", "Observer", "RequestRecord", "account_of"]

logger = logging.getLogger("penstock.server")

ACCOUNT = "penstock.account"
UNROUTED = "none"
CLIENT_LEFT = 499
"""The status recorded when a client disconnects before its response starts; nginx made the number customary."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
TRACE_HEADERS = ("traceparent", "tracestate")


class Account:
    """What one request asked of the engine, and what it got. Filled in by the response; owned by one task.

    Attributes:
        began: when the request arrived, in seconds of `time.monotonic`.
    """

    __slots__ = ("began", "outputs", "parsed")

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.parsed: ParsedRequest | None = None
        self.outputs: OutputStream | None = None


def account_of(scope: Scope) -> Account:
    """The account of the request with this ASGI scope; created if there is none."""
    account: Account = scope.setdefault(ACCOUNT, Account())
    return account


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request, when it is over.

    Attributes:
        id: the request id that the response carried.
        method: an HTTP method, or OTHER.
        route: the path as declared (`/v1/models/{model_id:path}`), so that routes are few; `none` if none matched.
        status: status of the response; 499 if the client disconnected before it started.
        complete: whether the response was sent to its end.
        started_ns: Unix time of arrival, in nanoseconds.
        seconds: time from arrival to the end.
        parsed: the parsed request, if the engine serves it and it could be read; otherwise None.
        outputs: its outputs; None if `parsed` is None.
        trace_headers: the W3C trace context that the caller sent.
        refused: the bound that it hit; None if it was not refused.
        parts: where the seconds went; `NO_PARTS` if the engine did not say, for example when the client has left.
    """

    id: str
    method: str
    route: str
    status: int
    complete: bool
    started_ns: int
    seconds: float
    parsed: ParsedRequest | None
    outputs: OutputStream | None
    trace_headers: Mapping[str, str]
    refused: RefusalCause | None = None
    parts: LatencyParts = NO_PARTS


Observer = Callable[[RequestRecord], None]


class Observe:
    """ASGI middleware, to be the outermost: calls every observer with the record of every HTTP request."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = tuple(observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, then call the observers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account, watched = account_of(scope), _Watched(send)
        started_ns = time.time_ns()
        try:
            await self._app(scope, receive, watched.send)
        finally:
            now, outputs = time.monotonic(), account.outputs
            record = RequestRecord(
                id=watched.request_id,
                method=scope["method"] if scope["method"] in METHODS else "OTHER",
                route=getattr(scope.get("route"), "path", UNROUTED),
                status=watched.status,
                complete=watched.complete,
                started_ns=started_ns,
                seconds=now - account.began,
                parsed=account.parsed,
                outputs=outputs,
                trace_headers=_trace_headers(Headers(scope=scope)),
                refused=refused_for(scope),
                parts=NO_PARTS if outputs is None else outputs.parts_until(now),
            )
            self._tell(record)
            if (refused := refused_unread(scope)) is not None:
                refused.tell = partial(self._refused_again, record)

    def _refused_again(self, record: RequestRecord, request_id: str, refusal: Overloaded) -> None:
        """Report a request that was refused at once, like the one in `record`."""
        now = time.time_ns()
        self._tell(replace(record, id=request_id, started_ns=now, seconds=0.0, complete=True, refused=refusal.cause))

    def _tell(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except Exception:  # a failing observer must harm neither the request nor the other observers
                logger.exception("an observer failed")


class _Watched:
    """Wraps `send`, and remembers what went through."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLIENT_LEFT
        self.request_id = ""
        self.complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = Headers(raw=message.get("headers", [])).get("x-request-id", "")
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


def _trace_headers(headers: Headers) -> dict[str, str]:
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
