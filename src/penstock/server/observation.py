"""Watching requests from outside: what each came to, told once, when it is over, to whoever observes.

Decides what a request's record holds: never a prompt, a completion, or any other string of a caller's but an id that
was checked. Observers (a counter, the log, spans) are called on the event loop and must be quick. Knows no endpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.exchange import Exchange, Replies

__all__ = ["Account", "Observe", "Observer", "RequestRecord", "account_of"]

logger = logging.getLogger("penstock.server")

ACCOUNT = "penstock.account"
UNROUTED = "none"
CLIENT_LEFT = 499
"""The status on record when a client left before its answer began; the number that nginx made customary."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
TRACE_HEADERS = ("traceparent", "tracestate")


class Account:
    """What one generating request asked and got. Filled by the response that answers it; one task owns it."""

    __slots__ = ("exchange", "replies")

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.replies: Replies | None = None


def account_of(scope: Scope) -> Account:
    """The account of the request with this ASGI scope; a new one where nobody observes."""
    account: Account = scope.setdefault(ACCOUNT, Account())
    return account


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One HTTP request, when it is over.

    Attributes:
        id: the request id that the answer carried.
        method: an HTTP method, or OTHER.
        route: the path as it was declared (`/v1/models/{model_id:path}`), so that there are few; `none` where none
            matched.
        status: of the answer; 499 when the client left before there was one.
        complete: whether the answer was sent to its end.
        started_ns: Unix time at which it came, in nanoseconds.
        seconds: until it was over.
        exchange: what was asked, for requests that generate and could be read; else None.
        replies: what came of that, beside `exchange`.
        trace_headers: the W3C trace context that the caller sent.
    """

    id: str
    method: str
    route: str
    status: int
    complete: bool
    started_ns: int
    seconds: float
    exchange: Exchange | None
    replies: Replies | None
    trace_headers: Mapping[str, str]


Observer = Callable[[RequestRecord], None]


class Observe:
    """ASGI middleware, to be the outermost: calls every observer with the record of every HTTP request."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = tuple(observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as the application does, and tell."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        account, watched = account_of(scope), _Watched(send)
        started_ns, began = time.time_ns(), time.perf_counter()
        try:
            await self._app(scope, receive, watched.send)
        finally:
            record = RequestRecord(
                id=watched.request_id,
                method=scope["method"] if scope["method"] in METHODS else "OTHER",
                route=getattr(scope.get("route"), "path", UNROUTED),
                status=watched.status,
                complete=watched.complete,
                started_ns=started_ns,
                seconds=time.perf_counter() - began,
                exchange=account.exchange,
                replies=account.replies,
                trace_headers=_trace_headers(Headers(scope=scope)),
            )
            self._tell(record)

    def _tell(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except Exception:  # watching a request must not harm it, nor keep the others from watching
                logger.exception("an observer failed")


class _Watched:
    """A `send` that remembers what went through."""

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
