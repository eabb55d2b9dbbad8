"""`/v1/responses`: create, get, cancel and delete, as OpenAI's endpoints of these names.

Decides when a response is stored (when it begins and when it ends, unless `store` is false), that one whose client
leaves ends as cancelled, and that a background response goes on by itself. Knows no shapes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from penstock.contract.errors import EngineFault, InvalidParameter, PenstockError
from penstock.contract.events import Usage
from penstock.contract.request import Message
from penstock.server.caller import Caller, caller_of
from penstock.server.delivery import Delivery, EngineResponse, Outlet, WholeDelivery, log_failure
from penstock.server.exchange import Replies, Transcript
from penstock.server.failures import error_object, json_response
from penstock.server.fitted_fields import fitted
from penstock.server.named_events import NamedEventDelivery
from penstock.server.openapi import answers, request_body
from penstock.server.response_store import ResponseStore, StoredResponse
from penstock.server.responses_answer import ResponseScript
from penstock.server.responses_request import (
    NEUTRAL_RESPONSES,
    RESPONSES_FIELDS,
    ResponseRequest,
    parse_response,
)
from penstock.server.serving import Serving
from penstock.server.strict_json import JsonObject, printable

__all__ = ["Responses", "add_routes"]


class Responses:
    """The responses of one application: those stored, and those made in the background."""

    def __init__(self, serving: Serving) -> None:
        limits = serving.access.limits
        self.store = ResponseStore(limits.max_stored_responses, limits.max_stored_bytes)
        self._serving = serving
        self._background: set[asyncio.Task[None]] = set()

    async def create(self, request: Request) -> Response:
        """Make a response: whole, in events, or in the background."""
        caller = caller_of(request.scope)
        response_id = "resp_" + secrets.token_hex(16)
        parsed = await self._serving.read(request, lambda body: self._parse(body, response_id, caller))
        exchange = caller.bind(parsed.exchange)
        keeper = _Keeper(self.store, parsed, caller.name)
        script = ResponseScript(self._head(parsed), keeper.keep, logprobs=parsed.logprobs)
        if parsed.background:
            body = script.begin()
            self._start(Replies(self._serving.client, exchange), script)
            return json_response(200, body)
        if exchange.stream:
            inner: Delivery = NamedEventDelivery(script)
        else:
            inner = WholeDelivery(script, exchange.num_choices)
        script.begin()
        return EngineResponse(self._serving.client, exchange, _Kept(inner, script))

    async def cancel(self, response_id: str, caller: Caller) -> JsonObject:
        """End a response that is being made; one that has ended stays as it is."""
        stored = self.store.get(response_id, caller.name)
        if stored.body["status"] != "in_progress":
            return stored.body
        self.store.put(StoredResponse(stored.tenant, stored.body | {"status": "cancelled"}, stored.history))
        await self._serving.client.abort_answer(response_id, caller.name)
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

    def _head(self, parsed: ResponseRequest) -> JsonObject:
        return {
            "id": parsed.exchange.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self._serving.card.name,
            "background": parsed.background,
            "store": parsed.store,
            "top_logprobs": 0,
            "truncation": "disabled",
            **parsed.repeated,
        }

    def _start(self, replies: Replies, script: ResponseScript) -> None:
        task = asyncio.create_task(_make(replies, script))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Puts each state of one response into the store."""

    store: ResponseStore
    parsed: ResponseRequest
    tenant: str

    def keep(self, body: JsonObject, answer: Message) -> None:
        if not self.parsed.store:
            return
        stored = StoredResponse(self.tenant, body, (*self.parsed.history, answer))
        if body["status"] == "in_progress":
            self.store.put(stored)
        else:
            self.store.update(stored)


class _Kept:
    """A delivery that leaves no response in progress behind."""

    def __init__(self, inner: Delivery, script: ResponseScript) -> None:
        self._inner = inner
        self._script = script

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        try:
            await self._inner.deliver(replies, outlet)
        except asyncio.CancelledError:
            self._script.cancel()
            raise
        except Exception as error:
            if not outlet.started:  # the caller gets an HTTP error, and the store what it says
                self._script.fail(error_object(error)["error"]["message"], replies.usage)
            raise

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        await self._inner.fail(error, usage, outlet)


async def _make(replies: Replies, script: ResponseScript) -> None:
    """Make a response that nobody waits for."""
    transcript = Transcript(1)
    try:
        async with aclosing(replies.stream()) as stream:
            async for output in stream:
                transcript.take(output)
        script.whole(transcript.choices(), replies.usage)
    except PenstockError as error:
        script.fail(error_object(error)["error"]["message"], replies.usage)
    except Exception as error:
        log_failure(error, "background response")
        script.fail(error_object(EngineFault())["error"]["message"], replies.usage)
    finally:
        script.cancel()


def _no_query(request: Request) -> None:
    """Query parameters would be ignored: refuse them by name."""
    for name in request.query_params:
        where = printable(name)
        raise InvalidParameter(where, f"{where!r} is not supported here.", code="unsupported_parameter")


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /v1/responses`, `GET` and `DELETE /v1/responses/{response_id}`, and its `POST .../cancel`."""
    responses = Responses(serving)
    extra = request_body(fitted(RESPONSES_FIELDS, serving.card), NEUTRAL_RESPONSES, "input")
    described = answers("Response", stream="text/event-stream")
    found = answers("Response", 400, 401, 403, 404)

    @app.post("/v1/responses", openapi_extra=extra, responses=described, response_class=Response)
    async def create_response(request: Request) -> Response:
        """Answer an input, in a conversation that can be continued by id."""
        return await responses.create(request)

    @app.get("/v1/responses/{response_id}", responses=found, response_class=Response)
    async def get_response(request: Request, response_id: str) -> Response:
        """A stored response as it is now."""
        _no_query(request)
        return json_response(200, responses.store.get(response_id, caller_of(request.scope).name).body)

    @app.delete("/v1/responses/{response_id}", responses=answers("Deleted", 401, 403, 404), response_class=Response)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a stored response."""
        responses.store.delete(response_id, caller_of(request.scope).name)
        return json_response(200, {"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel", responses=found, response_class=Response)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a response that is being made."""
        return json_response(200, await responses.cancel(response_id, caller_of(request.scope)))
