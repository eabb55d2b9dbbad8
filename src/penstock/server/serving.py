"""What every route is given: the engine, what it says of itself, the limits, and how a request's body is read.

Decides how a body becomes an `Exchange` on behalf of a caller: parsed (or, with `--compat`, parsed after taking out
what would be refused), then bound to the caller's key. Knows no endpoint.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.server.access import Access
from penstock.server.body import read_json
from penstock.server.caller import caller_of
from penstock.server.compat import parse_leniently
from penstock.server.exchange import Exchange
from penstock.server.live_asks import LiveAsks
from penstock.server.strict_json import JsonObject

__all__ = ["Parse", "Serving"]

T = TypeVar("T")
Parse = Callable[[JsonObject, str, ModelCard, RequestLimits], Exchange]


@dataclass(frozen=True, slots=True)
class Serving:
    """One served engine."""

    client: LiveAsks
    card: ModelCard
    limits: RequestLimits
    access: Access

    async def exchange(self, request: Request, prefix: str, parse: Parse) -> Exchange:
        """Read a generating request's body.

        Raises:
            RequestError: it cannot be served.
        """
        exchange_id = prefix + secrets.token_hex(16)
        parsed = await self.read(request, lambda body: parse(body, exchange_id, self.card, self.limits))
        return caller_of(request.scope).bind(parsed)

    async def read(self, request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Read any other request's body.

        Raises:
            RequestError: it cannot be served.
        """
        body = await read_json(request, self.limits.max_body_bytes)
        if not self.access.compat:
            return parse(body)
        return parse_leniently(body, parse, self.access.limits.max_ignored_params, request.scope)
