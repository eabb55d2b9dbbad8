"""Stored answers: found again by id, by the API key that made them, until newer ones take their place.

When the count or the bytes exceed the limits, the least recently used ones are dropped. That may be a response that is
still being made: its answer goes on, but nobody finds it here. All are kept in memory only, so a restart loses them.
Confined to one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.api_fields.strict_json import JsonObject, encode, weight
from penstock.contract.request import ChatPrompt, Message
from penstock.server.http.failures import HttpRefusal
from penstock.server.openai.responses_request import ResponseRequest

__all__ = ["ResponseStore", "SentStream", "Store", "StoredResponse"]

POSITION_BYTES = 80


class Stored(Protocol):
    """What a store keeps."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    @property
    def tenant(self) -> str:
        """Who made it; "" where the server has no keys."""
        ...

    def size(self) -> int:
        """Bytes, nearly."""
        ...


S = TypeVar("S", bound=Stored)


@dataclass(slots=True)
class SentStream:
    """The stream of a response, for those who ask for its rest by an event's number. Confined to one event loop.

    Attributes:
        wanted: the request, on its caller's behalf.
        positions: of each event that was sent, by its number, as in its id.
        renumbered: whether the events were sent once more since then as `responses_stored` makes them of the whole
            response: numbers are those of that stream now.
    """

    wanted: ResponseRequest
    positions: list[str] = field(default_factory=list)
    renumbered: bool = False

    def size(self) -> int:
        """Bytes, nearly: of the prompt and of the positions."""
        prompt = self.wanted.parsed.requests[0].prompt
        return POSITION_BYTES * len(self.positions) + (prompt.num_chars if isinstance(prompt, ChatPrompt) else 0)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The latest state of a response.

    Attributes:
        tenant: who made it; "" where the server has no keys.
        body: the response object.
        history: the conversation up to and including its answer, without the instructions.
        stream: its events, where it was streamed.
    """

    tenant: str
    body: JsonObject
    history: tuple[Message, ...]
    stream: SentStream | None = None

    @property
    def id(self) -> str:
        """The response's id."""
        response_id: str = self.body["id"]
        return response_id

    def size(self) -> int:
        """Bytes of memory, nearly: its object, the text of its history, and what is known of its stream."""
        stream = 0 if self.stream is None else self.stream.size()
        return weight(encode(self.body)) + sum(map(_bytes, self.history)) + stream


def _bytes(turn: Message) -> int:
    called = (call.id + call.name + call.arguments for call in turn.tool_calls)
    return len("".join([turn.content, turn.reasoning, turn.tool_call_id, turn.name, *called]).encode())


class Store(Generic[S]):
    """Answers of one kind; see the module.

    Attributes:
        kind: what one of them is called in errors, and in their codes.
    """

    kind = "answer"

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[S, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, stored: S) -> None:
        """Remember one, or its newer state."""
        self._drop(stored.id)
        size = stored.size()
        self._entries[stored.id] = (stored, size)
        self.bytes += size
        while len(self._entries) > self._max_count or self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def update(self, stored: S) -> None:
        """As `put`, unless it was deleted or dropped meanwhile."""
        if stored.id in self._entries:
            self.put(stored)

    def all(self, tenant: str) -> list[S]:
        """Those that `tenant` made."""
        return [stored for stored, _ in self._entries.values() if stored.tenant == tenant]

    def get(self, stored_id: str, tenant: str, param: str = "") -> S:
        """The one of that id, if `tenant` made it.

        Raises:
            HttpRefusal: there is none, or another caller made it; the error does not say which.
        """
        entry = self._entries.get(stored_id)
        if entry is None or entry[0].tenant != tenant:
            param = param or f"{self.kind}_id"
            message = f"{param}: there is no such {self.kind} here. They are kept in memory, the latest ones only."
            raise HttpRefusal(404, message, code=f"{self.kind}_not_found", param=param)
        self._entries.move_to_end(stored_id)
        return entry[0]

    def delete(self, stored_id: str, tenant: str) -> None:
        """Forget one.

        Raises:
            HttpRefusal: as `get`.
        """
        self.get(stored_id, tenant)
        self._drop(stored_id)

    def _drop(self, stored_id: str) -> None:
        entry = self._entries.pop(stored_id, None)
        if entry is not None:
            self.bytes -= entry[1]


class ResponseStore(Store[StoredResponse]):
    """The responses of one application."""

    kind = "response"

    def peek(self, response_id: str) -> StoredResponse | None:
        """The response of that id, whoever made it; None where there is none."""
        entry = self._entries.get(response_id)
        return None if entry is None else entry[0]
