"""Stored chat completions: stored if the request says `store: true`; listed, and retrieved, relabelled, deleted by id.

A stream is stored as one completion once it is complete; aborted or failed answers are not stored. They are kept in the
same kind of store as responses (`response_store`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request, Response

from penstock.api_fields.certificate import certificate_field
from penstock.api_fields.fields import LABELS, Field, Neutrals, read_fields
from penstock.api_fields.strict_json import JsonObject, encode, weight
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import Usage
from penstock.contract.journal import KeptAnswer
from penstock.server.delivery.deliveries import Delivery, ResponseFormatter
from penstock.server.delivery.output_stream import OutputStream, Transcript
from penstock.server.delivery.serving import Serving
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.query import PAGE, page_of, read_query
from penstock.server.http.response_writer import ResponseWriter
from penstock.server.http.route import Route
from penstock.server.openai.response_store import Store

__all__ = ["STORED_CHAT_FIELDS", "CompletionStore", "Storing", "StoredCompletion", "stored_routes"]

PATH = "/v1/chat/completions"
STORED_CHAT_FIELDS = (Field("metadata", LABELS, "The completion's labels from now on."),)
NO_NEUTRALS: Neutrals = {}


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """A completion and the messages that it answered.

    Attributes:
        tenant: who requested it; "" if the server has no keys.
        body: the chat completion, with its metadata.
        messages: the request's messages, unchanged.
    """

    tenant: str
    body: JsonObject
    messages: tuple[JsonObject, ...]

    @property
    def id(self) -> str:
        """The completion's id."""
        completion_id: str = self.body["id"]
        return completion_id

    def size(self) -> int:
        """Approximate size in memory, in bytes."""
        return weight(self.record())

    def record(self) -> bytes:
        """See `Stored.record`."""
        return encode([self.body, *self.messages])

    def labelled(self, metadata: Mapping[str, str]) -> StoredCompletion:
        """The same completion with other labels."""
        return replace(self, body=self.body | {"metadata": dict(metadata)})


class CompletionStore(Store[StoredCompletion]):
    """The stored chat completions of one application."""

    kind = "completion"

    def restored(self, kept: KeptAnswer) -> StoredCompletion:
        """See `Store.restored`."""
        body, *messages = json.loads(kept.content)
        return StoredCompletion(kept.tenant, body, tuple(messages))


@dataclass(frozen=True, slots=True)
class Storing:
    """A delivery that also stores the answer.

    Attributes:
        inner: the delivery to the client.
        formatter: builds the complete completion, even if chunks are delivered.
        entry: what to store, except for the completion itself.
        certified: whether the completion has its certificate.
    """

    inner: Delivery
    formatter: ResponseFormatter
    store: CompletionStore
    entry: StoredCompletion
    num_choices: int
    certified: bool

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Deliver, and store a complete answer before its end is sent."""
        outputs.kept = Transcript(self.num_choices)
        writer.before = partial(self._keep, outputs)
        await self.inner.deliver(outputs, writer)

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Fail as `inner` does."""
        await self.inner.fail(error, usage, writer)

    async def _keep(self, outputs: OutputStream) -> None:
        """If the completion is complete, store it, and wait until it would survive the end of the server."""
        if outputs.kept is None or not outputs.complete:
            return
        kept, outputs.kept = outputs.kept, None  # only once, even if this fails
        more = certificate_field(outputs.certificate, wanted=self.certified)
        whole = self.formatter.whole(kept.choices(), outputs.usage, more)
        self.store.put(replace(self.entry, body=whole | {"metadata": self.entry.body["metadata"]}))
        await self.store.settled()


def _labels(body: JsonObject) -> dict[str, str]:
    given = read_fields(body, STORED_CHAT_FIELDS, NO_NEUTRALS)
    if "metadata" not in given:
        raise InvalidParameter("metadata", "metadata is missing.", code="missing_value")
    labels: dict[str, str] = given["metadata"]
    return labels


def _id(value: StoredCompletion | JsonObject) -> str:
    return value.id if isinstance(value, StoredCompletion) else str(value["id"])


def stored_routes(serving: Serving, store: CompletionStore) -> tuple[Route, ...]:
    """List, retrieve, relabel and delete stored completions, and list their messages."""
    compat = serving.access.compat

    async def list_completions(http_request: Request) -> Response:
        """The stored chat completions, the oldest first."""
        query = read_query(http_request, "model", "metadata[]", *PAGE, compat=compat)
        found = [each for each in store.all(caller_of(http_request.scope).name) if _fits(each.body, query)]
        page, described = page_of(sorted(found, key=lambda each: each.body["created"]), query, _id)
        return json_response(200, described | {"data": [each.body for each in page]})

    async def get_completion(http_request: Request, completion_id: str) -> Response:
        """A stored chat completion."""
        read_query(http_request, compat=compat)
        return json_response(200, store.get(completion_id, caller_of(http_request.scope).name).body)

    async def update_completion(http_request: Request, completion_id: str) -> Response:
        """Give a stored chat completion other labels."""
        labels = await serving.read(http_request, _labels)
        changed = store.get(completion_id, caller_of(http_request.scope).name).labelled(labels)
        store.update(changed)
        await store.settled()
        return json_response(200, changed.body)

    async def delete_completion(http_request: Request, completion_id: str) -> Response:
        """Forget a stored chat completion."""
        store.delete(completion_id, caller_of(http_request.scope).name)
        await store.settled()
        return json_response(200, {"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    async def list_messages(http_request: Request, completion_id: str) -> Response:
        """The messages that a stored chat completion answered."""
        query = read_query(http_request, *PAGE, compat=compat)
        stored = store.get(completion_id, caller_of(http_request.scope).name)
        messages = [{"id": f"{stored.id}-{index}"} | message for index, message in enumerate(stored.messages)]
        page, described = page_of(messages, query, _id)
        return json_response(200, described | {"data": page})

    one = PATH + "/{completion_id}"
    found = answers("StoredCompletion", 400, 401, 403, 404)
    body = request_body(STORED_CHAT_FIELDS, NO_NEUTRALS, "metadata")
    return (
        Route("GET", PATH, list_completions, answers("Page", 400, 401, 403)),
        Route("GET", one, get_completion, found),
        Route("POST", one, update_completion, found, body),
        Route("DELETE", one, delete_completion, answers("Deleted", 401, 403, 404)),
        Route("GET", one + "/messages", list_messages, answers("Page", 400, 401, 403, 404)),
    )


def _fits(body: JsonObject, query: Mapping[str, list[str]]) -> bool:
    """Whether a completion has the requested model and labels."""
    if "model" in query and body["model"] != query["model"][-1]:
        return False
    wanted = {name[len("metadata[") : -1]: values[-1] for name, values in query.items() if name.startswith("metadata[")}
    labels: dict[str, str] = body["metadata"]
    return wanted.items() <= labels.items()
