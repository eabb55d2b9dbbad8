"""`/v1/responses`: create, get, cancel, delete, count tokens, compact, and list input items, as OpenAI's endpoints.

A response is stored when it begins and when it ends, unless `store` is false. If its client disconnects, it ends as
cancelled; a background response goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from penstock.api_fields.certificate import certificate_headers
from penstock.api_fields.fields import read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter, RequestError
from penstock.contract.request import Message
from penstock.server.delivery.deliveries import WholeDelivery, whole_delivery
from penstock.server.delivery.event_ids import END, HEADER
from penstock.server.delivery.named_events import UNKNOWN, NamedEventDelivery, named_event
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving
from penstock.server.http.caller import Caller, caller_of
from penstock.server.http.compat import list_ignored
from penstock.server.http.failures import HttpRefusal, ShuttingDown, error_response, json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.query import PAGE, flag, page_of, read_query
from penstock.server.http.response_writer import EVENT_HEADERS
from penstock.server.http.route import Route
from penstock.server.openai.response_store import ResponseStore, SentStream, StoredResponse
from penstock.server.openai.responses_background import BackgroundResponses
from penstock.server.openai.responses_compact import CompactionFormatter, compacting
from penstock.server.openai.responses_keeping import COMPLETE, Keeper, Kept
from penstock.server.openai.responses_request import (
    COMPACT_FIELDS,
    COUNT_INPUT_FIELDS,
    NEUTRAL_COMPACT,
    NEUTRAL_COUNT_INPUT,
    NEUTRAL_RESPONSES,
    RESPONSES_FIELDS,
    ResponseRequest,
    check_included,
    parse_response,
)
from penstock.server.openai.responses_stored import input_items, stored_events

__all__ = ["Responses", "routes"]


SHOWN = ("include", "include_obfuscation", "starting_after", "stream")
MOST_DIGITS = 18


class Responses:
    """The responses of one application: the stored ones, and those generated in the background."""

    def __init__(self, serving: Serving) -> None:
        limits = serving.access.limits
        self.store = ResponseStore(limits.max_stored_responses, limits.max_stored_bytes, serving.answers)
        serving.memory.watch("stored_responses", lambda: self.store.bytes)
        self._serving = serving
        self._background = BackgroundResponses(serving, self.store)

    async def create(self, http_request: Request) -> Response:
        """Create a response, complete, as events, or in the background; or send the rest of an interrupted one."""
        caller = caller_of(http_request.scope)

        def parse(body: JsonObject, response_id: str) -> tuple[ParsedRequest, tuple[ResponseRequest, JsonObject]]:
            wanted = self._parse(body, response_id, caller)
            return wanted.parsed, (wanted, body)

        parsed, (wanted, body) = await self._serving.accept(http_request, "resp_", parse)
        wanted = replace(wanted, parsed=parsed)
        if parsed.stream:
            return self._stream(wanted, caller, self._sent_stream(wanted))
        if wanted.background:
            if (known := self.store.peek(parsed.id)) is not None:  # the same request, with the same idempotency key
                await self.store.settled()
                return _stored_response(known.body)
            return json_response(200, await self._background.begin(wanted, body, caller.name))
        formatter = Keeper(self.store, wanted, caller.name).formatter()
        formatter.begin()
        return self._serving.respond(parsed, Kept(whole_delivery(parsed, formatter), formatter, self.store))

    def _sent_stream(self, wanted: ResponseRequest) -> SentStream:
        """The record of the response's earlier stream, if this server sent one; otherwise a new record."""
        known = self.store.peek(wanted.parsed.id)
        if known is None or known.stream is None or known.stream.wanted is None:
            return SentStream(wanted)
        return known.stream

    def _stream(self, wanted: ResponseRequest, caller: Caller, stream: SentStream) -> Response:
        """Stream a response, without the events that the client already has."""
        parsed = wanted.parsed
        formatter = Keeper(self.store, wanted, caller.name, stream).formatter()
        delivery = NamedEventDelivery(parsed, formatter, stream.positions)
        if parsed.position != END:
            stream.renumbered = False
            formatter.begin()
        return self._serving.respond(parsed, Kept(delivery, formatter, self.store))

    async def cancel(self, response_id: str, caller: Caller) -> JsonObject:
        """Cancel a response in progress; one that has ended stays as it is."""
        stored = self.store.get(response_id, caller.name)
        if stored.body["status"] != "in_progress":
            return stored.body
        self.store.put(StoredResponse(stored.tenant, stored.body | {"status": "cancelled"}, stored.history))
        await self._serving.live.abort_response(response_id, caller.name)
        await self.store.settled()
        return self.store.get(response_id, caller.name).body

    async def count(self, http_request: Request) -> Response:
        """Count the tokens of an input, as its conversation is formatted for the model."""
        caller = caller_of(http_request.scope)

        def parse(body: JsonObject) -> ResponseRequest:
            read_fields(body, COUNT_INPUT_FIELDS, NEUTRAL_COUNT_INPUT)
            return self._parse(body, "resp_count", caller)

        wanted = await self._serving.read(http_request, parse)
        try:
            prompt = await self._serving.client.tokenize(wanted.parsed.requests[0].prompt, caller.name)
        except RequestError as error:
            return error_response(error, wanted.parsed.aliases)
        return json_response(200, {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    async def compact(self, http_request: Request) -> Response:
        """Compact a conversation; see `responses_compact`."""
        caller = caller_of(http_request.scope)
        response_id = "resp_" + secrets.token_hex(16)

        def parse(body: JsonObject) -> ResponseRequest:
            read_fields(body, COMPACT_FIELDS, NEUTRAL_COMPACT)
            given = {name: body[name] for name in body if name not in NEUTRAL_COMPACT}
            return self._parse(given, response_id, caller)

        wanted = await self._serving.read(http_request, parse)
        asked = replace(wanted.parsed, requests=tuple(map(compacting, wanted.parsed.requests)))
        formatter = CompactionFormatter(response_id, wanted.history)
        return self._serving.respond(self._serving.bind(asked, http_request), WholeDelivery(formatter, 1))

    def replay(self, response_id: str, caller: Caller, after: int) -> Response:
        """Send the events of a stored response numbered above `after`; for a background response, once it has ended.

        A streamed response is generated again, so that it continues exactly after that event. But if all events are
        requested, and it is complete or an earlier server streamed it, they are built from the stored response.
        """
        stored = self.store.get(response_id, caller.name)
        stream = stored.stream
        if stream is not None and after < 0 and (stream.wanted is None or stored.body["status"] in COMPLETE):
            stream.renumbered = True
        if stream is not None and not stream.renumbered:
            return self._rest(stream, caller, after)

        async def events() -> AsyncGenerator[bytes, None]:
            await self._background.ended(response_id)
            with suppress(HttpRefusal):  # deleted meanwhile
                for event in stored_events(self.store.get(response_id, caller.name).body):
                    if event["sequence_number"] > after:
                        yield named_event(event)

        return StreamingResponse(events(), headers=EVENT_HEADERS)

    def _rest(self, stream: SentStream, caller: Caller, after: int) -> Response:
        """Send the rest of an earlier stream, after the event numbered `after`."""
        if stream.wanted is None:
            raise _from_before()
        position = "" if after < 0 else END if after >= len(stream.positions) else stream.positions[after]
        if position == END:
            return Response(headers=EVENT_HEADERS)
        if position == UNKNOWN:
            raise _from_before()
        if self._serving.stopping.is_set():  # it is new work, although the request is a GET
            raise ShuttingDown
        return self._stream(
            replace(stream.wanted, parsed=replace(stream.wanted.parsed, position=position)), caller, stream
        )

    def _parse(self, body: JsonObject, response_id: str, caller: Caller) -> ResponseRequest:
        return parse_response(
            body, response_id, self._serving.card_now, self._serving.limits, lambda each: self._recall(each, caller)
        )

    def _recall(self, response_id: str, caller: Caller) -> tuple[Message, ...]:
        stored = self.store.get(response_id, caller.name, "previous_response_id")
        if stored.body["status"] not in COMPLETE:
            message = f"previous_response_id: that response is {stored.body['status']}; it has no answer to go on from."
            raise InvalidParameter("previous_response_id", message)
        return stored.history


def _stored_response(body: JsonObject) -> Response:
    """A stored response; if it has a certificate, a header holds the digest, as in the original answer."""
    response = json_response(200, body)
    response.headers.update(certificate_headers(body.get("certificate") or ""))
    return response


def _from_before() -> HttpRefusal:
    message = f"starting_after: that event is from before this server's start; repeat the request with {HEADER}."
    return HttpRefusal(404, message, code="stream_not_found", param="starting_after")


def routes(serving: Serving) -> tuple[Route, ...]:
    """All routes under `/v1/responses`."""
    responses = Responses(serving)
    extra = request_body(fitted(RESPONSES_FIELDS, serving.card), NEUTRAL_RESPONSES, "input")
    described = answers("Response", stream="text/event-stream")
    found = answers("Response", 400, 401, 403, 404)
    compat = serving.access.compat

    def _check_included(query: dict[str, list[str]], http_request: Request) -> None:
        try:
            check_included(query.get("include", ()))
        except InvalidParameter as error:
            if not compat:
                raise
            list_ignored([error.param], http_request.scope)

    async def create_response(http_request: Request) -> Response:
        """Answer an input, in a conversation that can be continued by id."""
        return await responses.create(http_request)

    async def get_response(http_request: Request, response_id: str) -> Response:
        """A stored response as it is now."""
        query = read_query(http_request, *SHOWN, compat=compat)
        _check_included(query, http_request)
        after = query.get("starting_after", ["-1"])[-1]
        if after != "-1" and not (after.isascii() and after.isdecimal() and len(after) < MOST_DIGITS):
            raise InvalidParameter("starting_after", "starting_after must be the number of an event.")
        if flag(query, "stream"):
            return responses.replay(response_id, caller_of(http_request.scope), int(after))
        return _stored_response(responses.store.get(response_id, caller_of(http_request.scope).name).body)

    async def delete_response(http_request: Request, response_id: str) -> Response:
        """Forget a stored response."""
        responses.store.delete(response_id, caller_of(http_request.scope).name)
        await responses.store.settled()
        return json_response(200, {"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(http_request: Request, response_id: str) -> Response:
        """Cancel a response in progress."""
        return _stored_response(await responses.cancel(response_id, caller_of(http_request.scope)))

    async def list_input_items(http_request: Request, response_id: str) -> Response:
        """The items that a stored response answered, the latest first."""
        query = read_query(http_request, "include", *PAGE, compat=compat)
        _check_included(query, http_request)
        stored = responses.store.get(response_id, caller_of(http_request.scope).name)
        items = input_items(stored.history[:-1], stored.id.removeprefix("resp_"))  # its answer is the last turn
        page, about = page_of(items, query, lambda item: str(item["id"]), order="desc")
        return json_response(200, about | {"data": page})

    async def count_input(http_request: Request) -> Response:
        """How many tokens an input has."""
        return await responses.count(http_request)

    async def compact_response(http_request: Request) -> Response:
        """Shorten a conversation to the user's messages and a summary of the rest."""
        return await responses.compact(http_request)

    counting = request_body(fitted(COUNT_INPUT_FIELDS, serving.card), NEUTRAL_COUNT_INPUT, "input")
    compaction = request_body(fitted(COMPACT_FIELDS, serving.card), NEUTRAL_COMPACT, "input")
    return (
        Route("POST", "/v1/responses/input_tokens", count_input, answers("InputTokens"), counting),
        Route("POST", "/v1/responses/compact", compact_response, answers("Compaction"), compaction, queued=True),
        Route("GET", "/v1/responses/{response_id}/input_items", list_input_items, answers("Page", 400, 401, 403, 404)),
        Route("POST", "/v1/responses", create_response, described, extra, queued=True),
        Route("GET", "/v1/responses/{response_id}", get_response, found),
        Route("DELETE", "/v1/responses/{response_id}", delete_response, answers("Deleted", 401, 403, 404)),
        Route("POST", "/v1/responses/{response_id}/cancel", cancel_response, found),
    )
