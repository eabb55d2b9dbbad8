"""What every endpoint is given: the engine, what it says of itself, the limits, and how a request's body is read.

Decides how a body becomes a `ParsedRequest` on behalf of a caller: parsed (with `--compat`, after taking out what would
be refused), then bound to the caller's key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.ports import EngineClient
from penstock.server.delivery.deliveries import Delivery
from penstock.server.delivery.engine_response import EngineResponse
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.access import Access
from penstock.server.http.body import read_json
from penstock.server.http.caller import Caller, caller_of
from penstock.server.http.compat import parse_leniently

__all__ = ["Parse", "Serving", "bound"]

T = TypeVar("T")
Parse = Callable[[JsonObject, str, ModelCard, RequestLimits], ParsedRequest]
"""An endpoint's parser: the body, the response's id, the served model, the limits."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One served engine.

    Attributes:
        stopping: set when the server begins to stop.
    """

    client: EngineClient
    live: LiveRequests
    card: ModelCard
    limits: RequestLimits
    access: Access
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def parse(self, http_request: Request, prefix: str, parse: Parse) -> ParsedRequest:
        """Read a generating request; the response's id will begin with `prefix`.

        Raises:
            RequestError: it cannot be served.
        """
        response_id = prefix + secrets.token_hex(16)
        parsed = await self.read(http_request, lambda body: parse(body, response_id, self.card, self.limits))
        return bound(parsed, caller_of(http_request.scope))

    async def read(self, http_request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Read any other request's body.

        Raises:
            RequestError: it cannot be served.
        """
        body = await read_json(http_request, self.limits.max_body_bytes)
        if not self.access.compat:
            return parse(body)
        return parse_leniently(body, parse, self.access.limits.max_ignored_params, http_request.scope)

    def respond(self, parsed: ParsedRequest, delivery: Delivery) -> EngineResponse:
        """The HTTP answer to a parsed request."""
        return EngineResponse(self.live, parsed, delivery)


def bound(parsed: ParsedRequest, caller: Caller) -> ParsedRequest:
    """The same on a caller's behalf: its key decides the tenant and what prefix cache is shared."""
    return replace(parsed, requests=tuple(map(caller.bind, parsed.requests)))
