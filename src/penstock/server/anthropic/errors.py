"""Errors in Anthropic's format, on Anthropic's paths.

Converts OpenAI's error object, which the rest of this server writes, to Anthropic's. It wraps the whole application, so
that a refusal before routing (a bad key, a wrong method) has the same format.
"""

from __future__ import annotations

import json

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api_fields.strict_json import JsonObject, encode

__all__ = ["AnthropicErrors", "anthropic_error"]

PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
MODELS, VERSION = "/v1/models", b"anthropic-version"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FIRST_ERROR, FIRST_FAILURE = 400, 500


def anthropic_error(error: JsonObject, status: int) -> JsonObject:
    """Convert OpenAI's error object to Anthropic's."""
    kind = TYPES.get(status, "invalid_request_error" if status < FIRST_FAILURE else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


def _is_anthropic(scope: Scope) -> bool:
    """Whether an Anthropic client sent the request. Both vendors have `/v1/models`: a header tells them apart."""
    path: str = scope["path"]
    if path in PATHS:
        return True
    return (path == MODELS or path.startswith(f"{MODELS}/")) and VERSION in dict(scope["headers"])


class AnthropicErrors:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through, except for error responses, which are rewritten."""
        if scope["type"] != "http" or not _is_anthropic(scope):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewriter(send).send)


class _Rewriter:
    """Holds back an error's headers until its body is complete, because they contain its length."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= FIRST_ERROR:
            self._head = message
        elif self._head is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._head)

    async def _finish(self, head: Message) -> None:
        headers = MutableHeaders(scope=head)
        body = anthropic_error(json.loads(self._body), head["status"])
        body["request_id"] = headers.get("x-request-id")
        encoded = encode(body)
        headers["content-length"] = str(len(encoded))
        await self._send(head)
        await self._send({"type": "http.response.body", "body": encoded, "more_body": False})
