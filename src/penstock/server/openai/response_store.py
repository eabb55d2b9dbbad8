"""Stored responses: found again by id, by the API key that made them, until newer ones take their place.

When the count or the bytes exceed the limits, the least recently used responses are dropped. That may be one that is
still being made: its answer goes on, but nobody finds it here. Responses are kept in memory only, so a restart loses
them. Confined to one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.api_fields.strict_json import JsonObject, encode
from penstock.contract.request import Message
from penstock.server.http.failures import HttpRefusal

__all__ = ["ResponseStore", "StoredResponse"]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The latest state of a response.

    Attributes:
        tenant: who made it; "" where the server has no keys.
        body: the response object.
        history: the conversation up to and including its answer, without the instructions.
    """

    tenant: str
    body: JsonObject
    history: tuple[Message, ...]

    @property
    def id(self) -> str:
        """The response's id."""
        response_id: str = self.body["id"]
        return response_id

    def size(self) -> int:
        """Bytes, nearly: its JSON and the text of its history."""
        return len(encode(self.body)) + sum(map(_bytes, self.history))


def _bytes(turn: Message) -> int:
    called = (call.id + call.name + call.arguments for call in turn.tool_calls)
    return len("".join([turn.content, turn.reasoning, turn.tool_call_id, turn.name, *called]).encode())


class ResponseStore:
    """See the module."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: StoredResponse) -> None:
        """Remember a response, or its newer state."""
        self._drop(response.id)
        size = response.size()
        self._entries[response.id] = (response, size)
        self.bytes += size
        while len(self._entries) > self._max_count or self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def update(self, response: StoredResponse) -> None:
        """As `put`, unless the response was deleted or dropped meanwhile."""
        if response.id in self._entries:
            self.put(response)

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """The response of that id, if `tenant` made it.

        Raises:
            HttpRefusal: there is none, or another caller made it; the error does not say which.
        """
        entry = self._entries.get(response_id)
        if entry is None or entry[0].tenant != tenant:
            message = f"{param}: there is no such response here. Responses are kept in memory, the latest ones only."
            raise HttpRefusal(404, message, code="response_not_found", param=param)
        self._entries.move_to_end(response_id)
        return entry[0]

    def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response.

        Raises:
            HttpRefusal: as `get`.
        """
        self.get(response_id, tenant)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self.bytes -= entry[1]
