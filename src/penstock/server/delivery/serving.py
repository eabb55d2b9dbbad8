"""What every endpoint gets: the engine, its model card, the limits, and the reading of request bodies.

Decides how a body becomes a `ParsedRequest` on behalf of a caller: parsed (with `--compat`, without the fields that
would be refused), normalised (with `--normalize-prompts`), then bound to the caller's key and timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.api_fields.certificate import check_unasked_by_header
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.journal import AnswerJournal
from penstock.contract.limits import RequestLimits
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import ModelCard
from penstock.contract.ports import EngineClient
from penstock.contract.request import AnswerCaching, ChatPrompt, EngineRequest
from penstock.server.delivery.changing_lines import normalized
from penstock.server.delivery.deliveries import Delivery
from penstock.server.delivery.engine_response import EngineResponse
from penstock.server.delivery.event_ids import END
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.streams import Streams
from penstock.server.http.access import Access
from penstock.server.http.body import read_json
from penstock.server.http.cache_control import answer_caching
from penstock.server.http.caller import Caller, caller_of
from penstock.server.http.compat import EXTRA_HEADERS, parse_leniently
from penstock.server.http.own_timeout import own_timeout

__all__ = ["Clients", "Parse", "Serving", "bound", "read_body_of"]

NOTHING_LEFT = 204
"""Tells a reader of events not to reconnect (WHATWG HTML, section "Server-sent events")."""

ANY_CACHING = AnswerCaching()

T = TypeVar("T")
Clients = Callable[[], Sequence[EngineClient]]
"""Gives the engines that a server has now."""
Parse = Callable[[JsonObject, str, ModelCard, RequestLimits], ParsedRequest]
"""An endpoint's parser: the body, the response's id, the served model, the limits."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One served engine.

    Attributes:
        streams: streams that were begun and may be resumed.
        memory: accounts for the memory of the endpoints' stores.
        answers: where stored answers are written; None keeps them in memory only.
        stopping: set when the server begins to stop.
        around: functions that make contexts, entered when the server begins to serve and left when it ends.
    """

    client: EngineClient
    live: LiveRequests
    card: ModelCard
    limits: RequestLimits
    access: Access
    streams: Streams
    memory: MemoryBudget
    answers: AnswerJournal | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    around: list[Callable[[], AbstractAsyncContextManager[None]]] = field(default_factory=list)

    @property
    def card_now(self) -> ModelCard:
        """The model card, with the adapters that are loaded now."""
        return replace(self.card, adapters=tuple(self.client.adapters())) if self.card.takes_adapters else self.card

    async def parse(self, http_request: Request, prefix: str, parse: Parse) -> ParsedRequest:
        """Read a generating request; the response's id will begin with `prefix`.

        Raises:
            RequestError: as `accept`.
        """
        card = self.card_now
        parsed, _ = await self.accept(
            http_request, prefix, lambda body, response_id: (parse(body, response_id, card, self.limits), None)
        )
        return parsed

    async def accept(
        self, http_request: Request, prefix: str, parse: Callable[[JsonObject, str], tuple[ParsedRequest, T]]
    ) -> tuple[ParsedRequest, T]:
        """As `parse`, with a parser that takes the body and the id, and returns something else beside the request.

        Raises:
            RequestError: the request cannot be served, or it asks to resume a stream that it did not begin.
        """
        tenant = caller_of(http_request.scope).name
        origin = await self.streams.origin(http_request.headers, prefix, tenant)

        def begin(body: JsonObject) -> tuple[ParsedRequest, T]:
            parsed, beside = parse(body, origin.id)
            return self.streams.begin(origin, body, parsed), beside

        parsed, beside = await self.read(http_request, begin)
        bound = self.bind(parsed, http_request)
        await self.streams.write_down(origin)
        return bound, beside

    async def read(self, http_request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Read the body of any request; with `--compat`, without the fields that would be refused.

        Raises:
            RequestError: it cannot be served.
        """
        return await read_body_of(http_request, parse, self.limits, self.access)

    def bind(self, parsed: ParsedRequest, http_request: Request) -> ParsedRequest:
        """Bind a request to its caller's key, which gives it a tenant and a prefix cache, and to its timeout.

        Prompts are normalised too; a response header lists what was done to them.

        Raises:
            InvalidParameter: the caller's timeout header is malformed, or it sent a header that only answers have.
        """
        caller = caller_of(http_request.scope)
        seconds = own_timeout(http_request.headers, self.access.request_seconds)
        parsed, done = self.normalize(parsed)
        if done:
            http_request.scope.setdefault(EXTRA_HEADERS, {})["x-normalized"] = ", ".join(done)
        check_unasked_by_header(http_request.headers)
        caching = answer_caching(http_request.headers)
        return bound(self.adapted(parsed), caller, seconds, caching)

    def adapted(self, parsed: ParsedRequest) -> ParsedRequest:
        """The request with the adapter that it names in place of the model, if it names one."""
        if parsed.model in self.card.names or parsed.model not in self.card_now.adapters:
            return parsed
        return replace(parsed, requests=tuple(replace(each, adapter=parsed.model) for each in parsed.requests))

    def normalize(self, parsed: ParsedRequest) -> tuple[ParsedRequest, tuple[str, ...]]:
        """The request with normalised conversations, if the option is on, and what was done to them."""
        if not self.access.normalize_prompts:
            return parsed, ()
        requests: list[EngineRequest] = []
        done: dict[str, None] = {}  # in order, each once
        for each in parsed.requests:
            prompt, of_it = normalized(each.prompt) if isinstance(each.prompt, ChatPrompt) else (each.prompt, ())
            requests.append(replace(each, prompt=prompt))
            done |= dict.fromkeys(of_it)
        return replace(parsed, requests=tuple(requests)), tuple(done)

    def respond(self, parsed: ParsedRequest, delivery: Delivery) -> Response:
        """The HTTP response to a parsed request; an empty one if the client already has the whole stream."""
        if parsed.position == END:
            return Response(status_code=NOTHING_LEFT)
        return EngineResponse(self.live, self.streams, parsed, delivery)


async def read_body_of(
    http_request: Request, parse: Callable[[JsonObject], T], limits: RequestLimits, access: Access
) -> T:
    """Read the body of a request; with `--compat`, without the fields that would be refused.

    Raises:
        RequestError: it cannot be served.
    """
    body = await read_json(http_request, limits.max_body_bytes)
    if not access.compat:
        return parse(body)
    return parse_leniently(body, parse, access.limits.max_ignored_params, http_request.scope)


def bound(
    parsed: ParsedRequest, caller: Caller, max_seconds: float = 0.0, caching: AnswerCaching = ANY_CACHING
) -> ParsedRequest:
    """Bind a request to a caller; without `max_seconds` it may take as long as the server allows."""
    requests = tuple(
        replace(caller.bind(each), max_seconds=max_seconds, answer_caching=caching) for each in parsed.requests
    )
    return replace(parsed, requests=requests, concurrent=caller.concurrent)
