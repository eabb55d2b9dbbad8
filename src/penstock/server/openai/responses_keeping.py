"""Save a response's states to the store while it is generated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from penstock.api_fields.certificate import certificate_field
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import Usage
from penstock.contract.request import Message
from penstock.server.delivery.deliveries import Delivery
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.http.failures import error_object
from penstock.server.http.response_writer import ResponseWriter
from penstock.server.openai.response_store import Asked, ResponseStore, SentStream, StoredResponse
from penstock.server.openai.responses_answer import ResponsesFormatter
from penstock.server.openai.responses_request import ResponseRequest

__all__ = ["COMPLETE", "Keeper", "Kept"]

COMPLETE = ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class Keeper:
    """Saves each state of one response to the store.

    A complete response stays complete while it is generated again for a client that reconnected.

    Attributes:
        stream: a record of its event stream, if it is streamed.
        asked: what to generate it again from after a restart; None if that is not to be done.
    """

    store: ResponseStore
    wanted: ResponseRequest
    tenant: str
    stream: SentStream | None = None
    asked: Asked | None = None

    def keep(self, body: JsonObject, answer: Message) -> None:
        """Save the response object `body`, with its answer so far."""
        if not self.wanted.store:
            return
        stored = StoredResponse(self.tenant, body, (*self.wanted.history, answer), self.stream)
        known = self.store.peek(stored.id)
        if known is not None and known.body["status"] in COMPLETE:
            return
        if body["status"] == "in_progress":
            self.store.put(replace(stored, asked=self.asked))
        else:
            self.store.update(stored)

    def formatter(self) -> ResponsesFormatter:
        """Make the response's formatter, which saves each of its states."""
        wanted = self.wanted
        head = {
            "id": wanted.parsed.id,
            "object": "response",
            "created_at": wanted.parsed.created,
            "model": wanted.parsed.model,
            "background": wanted.background,
            "store": wanted.store,
            "top_logprobs": 0,
            "truncation": "disabled",
            **wanted.repeated,
            **certificate_field("", wanted=wanted.parsed.certified),  # until it ends
        }
        return ResponsesFormatter(head, self.keep, logprobs=wanted.logprobs)


@dataclass(frozen=True, slots=True)
class Kept:
    """A delivery that leaves no response in progress behind, and, with a journal, sends nothing before it is stored."""

    inner: Delivery
    formatter: ResponsesFormatter
    store: ResponseStore

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Deliver as `inner` does. If that is cancelled, or fails before it starts, end the stored response too."""
        if self.store.durable:
            writer.before = self.store.settled
        try:
            await self.inner.deliver(outputs, writer)
        except asyncio.CancelledError:
            self.formatter.cancel()
            raise
        except Exception as error:
            if not writer.started:  # the caller gets an HTTP error; store its message
                self.formatter.fail(error_object(error)["error"]["message"], outputs.usage)
            raise

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Fail as `inner` does."""
        await self.inner.fail(error, usage, writer)
