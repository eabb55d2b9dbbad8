"""Stored answers, which the API key that made them can retrieve by id until newer ones displace them.

When the count or the size exceeds its limit, the least recently used answers are dropped. That may be a response that
is still in progress: it goes on, but cannot be retrieved. All answers are kept in memory. With a journal, each state is
also written to disk, and the server loads them when it starts. Confined to one event loop.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.api_fields.strict_json import JsonObject, encode, weight
from penstock.contract.journal import AnswerJournal, KeptAnswer
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ToolCall
from penstock.server.http.failures import HttpRefusal
from penstock.server.openai.responses_request import ResponseRequest

__all__ = ["Asked", "ResponseStore", "SentStream", "Store", "StoredResponse"]

log = logging.getLogger("penstock.server")

POSITION_BYTES = 80


class Stored(Protocol):
    """An answer in a store."""

    @property
    def id(self) -> str:
        """The answer's id."""
        ...

    @property
    def tenant(self) -> str:
        """Who requested it; "" if the server has no keys."""
        ...

    def size(self) -> int:
        """Approximate size in bytes."""
        ...

    def record(self) -> bytes:
        """The complete answer, as it is written to the journal."""
        ...


S = TypeVar("S", bound=Stored)


@dataclass(slots=True)
class SentStream:
    """The stream of a response, for clients that ask for its rest by event number. Confined to one event loop.

    Attributes:
        wanted: the request, bound to its caller; None if an earlier server sent the stream: then the meaning of its
            event numbers is lost.
        positions: the position of each event that was sent, by event number, as in the event's id.
        renumbered: whether the events have since been sent again as `responses_stored` builds them from the complete
            response: event numbers now refer to that stream.
    """

    wanted: ResponseRequest | None
    positions: list[str] = field(default_factory=list)
    renumbered: bool = False

    def size(self) -> int:
        """Approximate size in bytes of the prompt and the positions."""
        prompt = None if self.wanted is None else self.wanted.parsed.requests[0].prompt
        return POSITION_BYTES * len(self.positions) + (prompt.num_chars if isinstance(prompt, ChatPrompt) else 0)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a background response is generated from again if the server ends before it is finished.

    Attributes:
        body: the request's body.
        before: how many messages of its conversation came from `previous_response_id`.
        starts: how often it was started.
        same_model: whether everything that the answer depends on besides its request is unchanged.
    """

    body: JsonObject
    before: int
    starts: int = 1
    same_model: bool = True


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The latest state of a response.

    Attributes:
        tenant: who requested it; "" if the server has no keys.
        body: the response object.
        history: the conversation up to and including its answer, without the instructions.
        stream: a record of its events, if it was streamed.
        asked: for a background response in progress that is to be generated again after a restart; otherwise None.
    """

    tenant: str
    body: JsonObject
    history: tuple[Message, ...]
    stream: SentStream | None = None
    asked: Asked | None = None

    @classmethod
    def restored(cls, kept: KeptAnswer) -> StoredResponse:
        """Read a response from its journal entry."""
        known = json.loads(kept.content)
        history = tuple(map(_read_turn, known["history"]))
        stream = SentStream(None) if known["streamed"] else None
        asked = Asked(**known["asked"], same_model=kept.same_model) if "asked" in known else None
        return cls(kept.tenant, known["body"], history, stream, asked)

    @property
    def id(self) -> str:
        """The response's id."""
        response_id: str = self.body["id"]
        return response_id

    def size(self) -> int:
        """Approximate bytes of memory for its object, the text of its history, its stream, and its request."""
        stream = 0 if self.stream is None else self.stream.size()
        asked = 0 if self.asked is None else weight(encode(self.asked.body))
        return weight(encode(self.body)) + sum(map(_bytes, self.history)) + stream + asked

    def record(self) -> bytes:
        """See `Stored.record`."""
        known: JsonObject = {"body": self.body, "history": list(map(_turn, self.history))}
        known["streamed"] = self.stream is not None
        if self.asked is not None:
            known["asked"] = {name: getattr(self.asked, name) for name in ("body", "before", "starts")}
        return encode(known)


def _turn(message: Message) -> JsonObject:
    """A message as it is written to the journal: its non-empty fields."""
    return {name: value for name, value in asdict(message).items() if value}


def _read_turn(turn: JsonObject) -> Message:
    calls = tuple(ToolCall(**call) for call in turn.get("tool_calls", ()))
    rest: dict[str, str] = {name: value for name, value in turn.items() if name != "tool_calls"}
    return Message(**{"role": "", "content": ""} | rest, tool_calls=calls)


def _bytes(turn: Message) -> int:
    called = (call.id + call.name + call.arguments for call in turn.tool_calls)
    return len("".join([turn.content, turn.reasoning, turn.tool_call_id, turn.name, *called]).encode())


class Store(Generic[S]):
    """Stores answers of one kind; see the module.

    Args:
        max_count: most answers to keep.
        max_bytes: limit on their approximate total size.
        answers: the journal to load answers from and write them to; None to keep them in memory alone.

    Raises:
        ConfigError: the journal cannot be read.

    Attributes:
        kind: the name of such an answer in errors and in their codes.
        bytes: approximate total size of the stored answers.
    """

    kind = "answer"

    def __init__(self, max_count: int, max_bytes: int, answers: AnswerJournal | None = None) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._answers = answers
        self._entries: OrderedDict[str, tuple[S, int]] = OrderedDict()
        self.bytes = 0
        for kept in () if answers is None else answers.load(self.kind):
            self._restore(kept)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def durable(self) -> bool:
        """Whether answers outlive the server."""
        return self._answers is not None

    def restored(self, kept: KeptAnswer) -> S:
        """Read an answer from its journal entry."""
        raise NotImplementedError

    def put(self, stored: S) -> None:
        """Store an answer, or its newer state."""
        if self._answers is not None:
            self._answers.put(KeptAnswer(self.kind, stored.id, stored.tenant, stored.record()))
        self._take(stored)

    def update(self, stored: S) -> None:
        """As `put`, unless the answer was deleted or dropped meanwhile."""
        if stored.id in self._entries:
            self.put(stored)

    async def settled(self) -> None:
        """With a journal, wait until everything put and deleted so far would survive the end of this process."""
        if self._answers is not None:
            await self._answers.settled()

    def all(self, tenant: str) -> list[S]:
        """All answers that `tenant` requested."""
        return [stored for stored, _ in self._entries.values() if stored.tenant == tenant]

    def get(self, stored_id: str, tenant: str, param: str = "") -> S:
        """The answer with this id, if `tenant` requested it.

        Raises:
            HttpRefusal: there is none, or another caller requested it; the error does not say which.
        """
        entry = self._entries.get(stored_id)
        if entry is None or entry[0].tenant != tenant:
            param = param or f"{self.kind}_id"
            where = "in the journal" if self.durable else "in memory"
            message = f"{param}: there is no such {self.kind} here. They are kept {where}, the latest ones only."
            raise HttpRefusal(404, message, code=f"{self.kind}_not_found", param=param)
        self._entries.move_to_end(stored_id)
        return entry[0]

    def delete(self, stored_id: str, tenant: str) -> None:
        """Delete an answer.

        Raises:
            HttpRefusal: as `get`.
        """
        self.get(stored_id, tenant)
        self._forget(stored_id)
        if self._answers is not None:
            self._answers.delete(self.kind, stored_id)

    def _restore(self, kept: KeptAnswer) -> None:
        try:
            stored = self.restored(kept)
        except (KeyError, TypeError, ValueError) as error:
            why = type(error).__name__  # its message may contain user text
            log.warning("a stored %s in the journal cannot be read and is removed: %s: %s", self.kind, kept.id, why)
            self._drop(kept.id)
        else:
            self._take(stored)

    def _drop(self, stored_id: str) -> None:
        if self._answers is not None:
            self._answers.drop(self.kind, stored_id)

    def _take(self, stored: S) -> None:
        self._forget(stored.id)
        size = stored.size()
        self._entries[stored.id] = (stored, size)
        self.bytes += size
        while len(self._entries) > self._max_count or self.bytes > self._max_bytes:
            oldest = next(iter(self._entries))
            self._forget(oldest)
            self._drop(oldest)

    def _forget(self, stored_id: str) -> None:
        entry = self._entries.pop(stored_id, None)
        if entry is not None:
            self.bytes -= entry[1]


class ResponseStore(Store[StoredResponse]):
    """The responses of one application."""

    kind = "response"

    def restored(self, kept: KeptAnswer) -> StoredResponse:
        """See `Store.restored`."""
        return StoredResponse.restored(kept)

    def unfinished(self) -> list[StoredResponse]:
        """The responses in progress, oldest first."""
        return [stored for stored, _ in self._entries.values() if stored.body["status"] == "in_progress"]

    def peek(self, response_id: str) -> StoredResponse | None:
        """The response with this id, whoever requested it; None if there is none."""
        entry = self._entries.get(response_id)
        return None if entry is None else entry[0]
