"""Refuse requests while the queue is full: 429 with `Retry-After`, before their bodies are parsed.

This check assumes the queue of a moment ago and the smallest possible request; a request that passes is checked again
for what it asks. A request that resumes a stream (`Last-Event-ID`) skips this check, because there may be nothing left
to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.errors import Overloaded
from penstock.server.http.body import discard_body
from penstock.server.http.caller import caller_of
from penstock.server.http.connection import last_of_its_connection
from penstock.server.http.failures import error_response
from penstock.server.http.known_refusals import SCOPE_KEY, Refused
from penstock.server.http.route import Route

__all__ = ["RefuseWhenFull"]


class RefuseWhenFull:
    """ASGI middleware; see the module.

    Args:
        check: raises `Overloaded` if the queue had no room for even a smallest request of this tenant a moment ago.
        routes: the application's routes; `queued` ones have no captures in their paths.
        resumes: the header that asks to resume a stream.
        max_body_bytes: how much of a refused body is read, so that the client sees the refusal and not a reset.
    """

    def __init__(
        self, app: ASGIApp, check: Callable[[str], None], routes: Iterable[Route], resumes: str, max_body_bytes: int
    ) -> None:
        self._app = app
        self._check = check
        self._routes = {(each.method, each.path): each for each in routes if each.queued}
        self._resumes = resumes
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429."""
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is not None and self._resumes not in (headers := Headers(scope=scope)):
            tenant = caller_of(scope).name
            try:
                self._check(tenant)
            except Overloaded as refusal:
                scope["route"] = route  # for observers, as the router does for any other request
                if "transfer-encoding" not in headers:  # otherwise the head does not say where the body ends
                    scope[SCOPE_KEY] = Refused(tenant, refusal, int(headers.get("content-length", "0")))
                whole = await discard_body(receive, self._max_body_bytes)
                await error_response(refusal)(scope, receive, send if whole else last_of_its_connection(send))
                return
        await self._app(scope, receive, send)
