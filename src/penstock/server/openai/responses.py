"""`/v1/responses`: create, get, cancel and delete, as OpenAI's endpoints of these names.

A response is stored when it begins and when it ends, unless `store` is false. If its client leaves, it ends as
cancelled; a background response goes on by itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request, Response

from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import EngineFault, InvalidParameter, PenstockError
from penstock.contract.events import Usage
from penstock.contract.request import Message
from penstock.server.delivery.deliveries import Delivery, WholeDelivery
from penstock.server.delivery.named_events import NamedEventDelivery
from penstock.server.delivery.output_stream import OutputStream, Transcript
from penstock.server.delivery.serving import Serving, bound
from penstock.server.http.caller import Caller, caller_of
from penstock.server.http.failures import error_object, json_response, log_failure
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.response_writer import ResponseWriter
from penstock.server.http.route import Route
from penstock.server.openai.response_store import ResponseStore, StoredResponse
from penstock.server.openai.responses_answer import ResponsesFormatter
from penstock.server.openai.responses_request import (
    NEUTRAL_RESPONSES,
    RESPONSES_FIELDS,
    ResponseRequest,
    parse_response,
)

__all__ = ["Responses", "routes"]


class Responses:
    """The responses of one application: those stored, and those made in the background."""

    def __init__(self, serving: Serving) -> None:
        limits = serving.access.limits
        self.store = ResponseStore(limits.max_stored_responses, limits.max_stored_bytes)
        self._serving = serving
        self._background: set[asyncio.Task[None]] = set()

    async def create(self, http_request: Request) -> Response:
        """Make a response: whole, in events, or in the background."""
        caller = caller_of(http_request.scope)
        response_id = "resp_" + secrets.token_hex(16)
        wanted = await self._serving.read(http_request, lambda body: self._parse(body, response_id, caller))
        parsed = bound(wanted.parsed, caller)
        keeper = _Keeper(self.store, wanted, caller.name)
        formatter = ResponsesFormatter(self._head(wanted), keeper.keep, logprobs=wanted.logprobs)
        if wanted.background:
            body = formatter.begin()
            self._start(OutputStream(self._serving.live, parsed), formatter)
            return json_response(200, body)
        inner: Delivery
        inner = NamedEventDelivery(formatter) if parsed.stream else WholeDelivery(formatter, parsed.num_choices)
        formatter.begin()
        return self._serving.respond(parsed, _Kept(inner, formatter))

    async def cancel(self, response_id: str, caller: Caller) -> JsonObject:
        """End a response that is being made; one that has ended stays as it is."""
        stored = self.store.get(response_id, caller.name)
        if stored.body["status"] != "in_progress":
            return stored.body
        self.store.put(StoredResponse(stored.tenant, stored.body | {"status": "cancelled"}, stored.history))
        await self._serving.live.abort_response(response_id, caller.name)
        return self.store.get(response_id, caller.name).body

    def _parse(self, body: JsonObject, response_id: str, caller: Caller) -> ResponseRequest:
        return parse_response(
            body, response_id, self._serving.card, self._serving.limits, lambda each: self._recall(each, caller)
        )

    def _recall(self, response_id: str, caller: Caller) -> tuple[Message, ...]:
        stored = self.store.get(response_id, caller.name, "previous_response_id")
        if stored.body["status"] not in ("completed", "incomplete"):
            message = f"previous_response_id: that response is {stored.body['status']}; it has no answer to go on from."
            raise InvalidParameter("previous_response_id", message)
        return stored.history

    def _head(self, wanted: ResponseRequest) -> JsonObject:
        return {
            "id": wanted.parsed.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": wanted.parsed.model,
            "background": wanted.background,
            "store": wanted.store,
            "top_logprobs": 0,
            "truncation": "disabled",
            **wanted.repeated,
        }

    def _start(self, outputs: OutputStream, formatter: ResponsesFormatter) -> None:
        task = asyncio.create_task(_make(outputs, formatter))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Puts each state of one response into the store."""

    store: ResponseStore
    wanted: ResponseRequest
    tenant: str

    def keep(self, body: JsonObject, answer: Message) -> None:
        if not self.wanted.store:
            return
        stored = StoredResponse(self.tenant, body, (*self.wanted.history, answer))
        if body["status"] == "in_progress":
            self.store.put(stored)
        else:
            self.store.update(stored)


class _Kept:
    """A delivery that leaves no response in progress behind."""

    def __init__(self, inner: Delivery, formatter: ResponsesFormatter) -> None:
        self._inner = inner
        self._formatter = formatter

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        try:
            await self._inner.deliver(outputs, writer)
        except asyncio.CancelledError:
            self._formatter.cancel()
            raise
        except Exception as error:
            if not writer.started:  # the caller gets an HTTP error, and the store what it says
                self._formatter.fail(error_object(error)["error"]["message"], outputs.usage)
            raise

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        await self._inner.fail(error, usage, writer)


async def _make(outputs: OutputStream, formatter: ResponsesFormatter) -> None:
    """Make a response that nobody waits for."""
    transcript = Transcript(1)
    try:
        async with aclosing(outputs.stream()) as stream:
            async for output in stream:
                transcript.take(output)
        formatter.whole(transcript.choices(), outputs.usage)
    except PenstockError as error:
        formatter.fail(error_object(error)["error"]["message"], outputs.usage)
    except Exception as error:
        log_failure(error, "background response")
        formatter.fail(error_object(EngineFault())["error"]["message"], outputs.usage)
    finally:
        formatter.cancel()


def _no_query(http_request: Request) -> None:
    """Refuse query parameters by name; they would be ignored."""
    for name in http_request.query_params:
        where = printable(name)
        raise InvalidParameter(where, f"{where!r} is not supported here.", code="unsupported_parameter")


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /v1/responses`, `GET` and `DELETE /v1/responses/{response_id}`, and its `POST .../cancel`."""
    responses = Responses(serving)
    extra = request_body(fitted(RESPONSES_FIELDS, serving.card), NEUTRAL_RESPONSES, "input")
    described = answers("Response", stream="text/event-stream")
    found = answers("Response", 400, 401, 403, 404)

    async def create_response(http_request: Request) -> Response:
        """Answer an input, in a conversation that can be continued by id."""
        return await responses.create(http_request)

    async def get_response(http_request: Request, response_id: str) -> Response:
        """A stored response as it is now."""
        _no_query(http_request)
        return json_response(200, responses.store.get(response_id, caller_of(http_request.scope).name).body)

    async def delete_response(http_request: Request, response_id: str) -> Response:
        """Forget a stored response."""
        responses.store.delete(response_id, caller_of(http_request.scope).name)
        return json_response(200, {"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(http_request: Request, response_id: str) -> Response:
        """End a response that is being made."""
        return json_response(200, await responses.cancel(response_id, caller_of(http_request.scope)))

    return (
        Route("POST", "/v1/responses", create_response, described, extra),
        Route("GET", "/v1/responses/{response_id}", get_response, found),
        Route("DELETE", "/v1/responses/{response_id}", delete_response, answers("Deleted", 401, 403, 404)),
        Route("POST", "/v1/responses/{response_id}/cancel", cancel_response, found),
    )
