"""Admission to the HTTP application: API keys, Host names and web pages' origins.

If the server has keys, every path requires one, except `OPEN_PATHS` and the files of the web page, where users enter
their key; `ADMIN_PATHS` require an admin key. Only the raw path decides whether a path is open. A request with a
foreign Host name is refused: a web page may have pointed its own name at this machine (DNS rebinding). Web pages of
other origins can neither read responses nor change anything, unless the operator allows them (CORS, per the Fetch
standard).
Invariant: a path that is not spelled exactly like an open one, and is not below the page's folder, is guarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.contract.errors import RefusalCause
from penstock.server.http.access import ANY, Access
from penstock.server.http.caller import SCOPE_KEY, Caller
from penstock.server.http.failures import HttpRefusal, error_response

__all__ = ["ADMIN_PATHS", "OPEN_PATHS", "Guard"]

OPEN_PATHS = frozenset({b"/health/live"})
ADMIN_PATHS = frozenset(
    {
        *(b"/reset_prefix_cache", b"/start_profile", b"/stop_profile"),
        *(b"/models/load", b"/models/unload", b"/models/pin", b"/models/unpin"),
        *(b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"),
    }
)
HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::[0-9]*)?")
SAFE_METHODS = ("GET", "HEAD")
CORS_METHODS = "GET, POST, DELETE"
CORS_HEADERS = (
    "authorization, content-type, idempotency-key, last-event-id, x-api-key, x-request-id, x-request-timeout,"
    " anthropic-version"
)
CORS_EXPOSED = "x-request-id, x-ignored-params, x-normalized, retry-after"
PREFLIGHT_SECONDS = "600"


class Guard:
    """ASGI middleware; see the module.

    Args:
        access: the rules.
        is_public: whether a raw path may be read without a key; true only for files that contain no secret.
    """

    def __init__(self, app: ASGIApp, access: Access, is_public: Callable[[str], bool]) -> None:
        self._app = app
        self._access = access
        self._is_public = is_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with the reason."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        reply = _with_cors(send, origin) if self._welcomes(origin) else send
        try:
            self._check_shape(headers)
            self._check_host(headers)
            if _is_preflight(scope, headers) and self._welcomes(origin):
                await _preflight()(scope, receive, reply)
                return
            self._check_origin(scope, headers, origin)
            scope[SCOPE_KEY] = self._caller(scope, headers)
        except HttpRefusal as refusal:
            await error_response(refusal)(scope, receive, reply)
            return
        await self._app(scope, receive, reply)

    def _check_shape(self, headers: Headers) -> None:
        most = self._access.limits.max_headers
        if len(headers.raw) > most:
            raise _too_much(f"A request may have at most {most} headers.", "too_many_headers")
        most = self._access.limits.max_header_bytes
        if sum(len(name) + len(value) for name, value in headers.raw) > most:
            raise _too_much(f"A request's headers may have at most {most} bytes.", "headers_too_large")

    def _check_host(self, headers: Headers) -> None:
        name = host_name(headers.get("host", ""))
        if self._access.hosts and name not in self._access.hosts:
            message = "This server does not answer to that Host; see --allowed-hosts."
            raise _forbidden(message, "host_not_allowed")

    def _check_origin(self, scope: Scope, headers: Headers, origin: str) -> None:
        """Refuse unsafe methods to other origins: a page that cannot read the response must not change anything."""
        if scope["method"] in SAFE_METHODS or not origin or self._welcomes(origin):
            return
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            message = "Web pages of other origins may not call this server; see --cors-origins."
            raise _forbidden(message, "origin_not_allowed")

    def _welcomes(self, origin: str) -> bool:
        origins = self._access.origins
        return bool(origin) and (ANY in origins or origin.lower() in origins)

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if not self._access.keys or self._is_open(scope["method"], path):
            return Caller()
        caller = self._access.keys.find(_key_in(headers))
        if caller is None:
            message, kind = "A valid API key is needed.", "authentication_error"
            raise HttpRefusal(401, message, code="invalid_api_key", kind=kind, cause=RefusalCause.ACCESS)
        if not caller.admin and scope["path"].encode() in ADMIN_PATHS:
            raise _forbidden("This needs an admin's key.", "admin_only")
        return caller

    def _is_open(self, method: str, raw_path: bytes) -> bool:
        return raw_path in OPEN_PATHS or (method in SAFE_METHODS and self._is_public(raw_path.decode("latin-1")))


def _forbidden(message: str, code: str) -> HttpRefusal:
    return HttpRefusal(403, message, code=code, kind="permission_error", cause=RefusalCause.ACCESS)


def _too_much(message: str, code: str) -> HttpRefusal:
    return HttpRefusal(431, message, code=code, cause=RefusalCause.HEADERS)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets (RFC 9110, section 7.2); "" if it is malformed."""
    match = HOST.fullmatch(host)
    return (match["name"] or match["address"]).lower() if match else ""


def _key_in(headers: Headers) -> str:
    """The given key: OpenAI's clients send it as a bearer token (RFC 6750), Anthropic's as x-api-key."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight() -> Response:
    headers = {
        "access-control-allow-methods": CORS_METHODS,
        "access-control-allow-headers": CORS_HEADERS,
        "access-control-max-age": PREFLIGHT_SECONDS,
    }
    return Response(status_code=204, headers=headers)


def _with_cors(send: Send, origin: str) -> Send:
    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = CORS_EXPOSED
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_cors
