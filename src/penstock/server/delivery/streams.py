"""The answers that this server began and may have to repeat: what is remembered of them, and who may resume them.

An answer depends on its request alone, so a stream is resumed by computing the same request again and skipping what the
client has. The client sends the request again, with the id of the last event that it has (`Last-Event-ID`, WHATWG HTML,
section "Server-sent events"). What the request does not say is remembered here: the answer's id, its creation time, and
that this caller began it with this very body. If the request names no seed, the seed is derived from the answer's id.
Nothing of an answer is kept, and nothing goes on for a client that has disconnected.

If a request has an `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header), its answer's id is derived from the
key, so the same request with the same key gets the same answer, even if it names no seed.

Invariant: one answer has one reader. A client that resumes ends its earlier connection, if the server has not yet
noticed that it is gone. Confined to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.journal import BegunStream, Journal
from penstock.contract.memory_budget import STREAM_BYTES
from penstock.contract.request import EngineRequest
from penstock.server.delivery.event_ids import HEADER
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.http.failures import HttpRefusal

__all__ = ["Origin", "Resumed", "Streams", "with_seed"]

SEED_BITS = 62
UNKNOWN, CONFLICT, REUSED = 404, 409, 422
KEY_HEADER = "Idempotency-Key"
KEY = re.compile(r"[\x21-\x7e]{1,255}")


class Resumed(HttpRefusal):
    """The same answer was asked for on another connection."""

    def __init__(self) -> None:
        message = "This answer goes on elsewhere: it was asked for on another connection."
        super().__init__(CONFLICT, message, code="resumed_elsewhere")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an answer comes from: a new request, or one that was begun before.

    Attributes:
        id: the answer's id.
        created: Unix time at which it was begun.
        tenant: who asks for it.
        position: what the client has of it; "" for nothing.
        begun: the record of its beginning; None for a new answer.
        keyed: whether it has an idempotency key.
        resumed: whether the client asks to resume it.
    """

    id: str
    created: int
    tenant: str
    position: str = ""
    begun: BegunStream | None = None
    keyed: bool = False
    resumed: bool = False


class Streams:
    """The streams of one application; see the module.

    Args:
        most: how many are remembered; beyond that, the oldest of the caller with the most is forgotten.
        journal: remembers more, also across restarts; None if there is none.
    """

    def __init__(self, most: int, journal: Journal | None = None) -> None:
        self._most = most
        self._journal = journal
        self._count = 0
        self._begun: dict[str, OrderedDict[str, BegunStream]] = {}  # by tenant
        self._answering: dict[str, _Reading] = {}

    @property
    def bytes(self) -> int:
        """Approximate memory of the remembered streams."""
        return self._count * STREAM_BYTES

    async def origin(self, headers: Mapping[str, str], prefix: str, tenant: str) -> Origin:
        """Tell whether a request asks for a new answer (with an id from `prefix`), for a known one, or to resume one.

        Raises:
            InvalidParameter: the idempotency key is malformed, or another answer's.
            HttpRefusal: this caller has no such answer to resume, or the answer would no longer be the same.
        """
        last, key = headers.get(HEADER), headers.get(KEY_HEADER)
        if last is None and key is None:
            return Origin(prefix + secrets.token_hex(16), int(time.time()), tenant)
        keyed_id = "" if key is None else _keyed_id(prefix, tenant, key)
        answer_id, _, position = (keyed_id if last is None else last).partition(":")
        begun = await self._find(answer_id, tenant) if answer_id.startswith(prefix) else None
        name = KEY_HEADER if last is None else HEADER
        if begun is None and last is None:
            return Origin(keyed_id, int(time.time()), tenant, keyed=True)
        if begun is None:
            message = f"{HEADER}: no such stream was begun here by this caller and at this path, or it is forgotten."
            raise HttpRefusal(UNKNOWN, message, code="stream_not_found", param=HEADER)
        if keyed_id not in ("", answer_id):
            raise InvalidParameter(
                KEY_HEADER, f"{KEY_HEADER} is not the one that the answer in {HEADER} was begun with."
            )
        if not begun.same_model:
            message = f"{name}: that answer was begun with another model, or under other options of this server."
            raise HttpRefusal(CONFLICT, message, code="stream_model_differs", param=name)
        keyed, resumed = key is not None, last is not None
        return Origin(begun.id, begun.created, tenant, position, begun, keyed=keyed, resumed=resumed)

    def begin(self, origin: Origin, body: JsonObject, parsed: ParsedRequest) -> ParsedRequest:
        """Give `parsed` its origin and its seeds. An answer in events or with a key is remembered, not yet journalled.

        Raises:
            HttpRefusal: the answer was begun with another body.
            InvalidParameter: the request is to resume a stream, but does not ask for events.
        """
        in_events = parsed.stream and parsed.events
        if origin.resumed and not in_events:
            raise InvalidParameter(
                HEADER, f"{HEADER} is only allowed together with stream: true, where events have ids."
            )
        if in_events or origin.keyed:
            begun = BegunStream(origin.id, origin.tenant, _digest(body), origin.created)
            if origin.begun is not None and origin.begun.digest != begun.digest:
                raise _other_body(origin.resumed)
            self._remember(begun)
        requests = tuple(map(with_seed, parsed.requests))
        return replace(parsed, requests=requests, created=origin.created, position=origin.position)

    async def _find(self, answer_id: str, tenant: str) -> BegunStream | None:
        begun = self._known(answer_id, tenant)
        if begun is None and self._journal is not None:
            begun = await self._journal.find(answer_id)
        return begun if begun is not None and begun.tenant == tenant else None

    def _known(self, answer_id: str, tenant: str) -> BegunStream | None:
        own = self._begun.get(tenant)
        return None if own is None else own.get(answer_id)

    async def write_down(self, origin: Origin) -> None:
        """Write a new stream to the journal, if there is one, so that it survives the end of this server."""
        begun = self._known(origin.id, origin.tenant)
        if self._journal is not None and origin.begun is None and begun is not None:
            await self._journal.add(begun)

    @asynccontextmanager
    async def reading(self, answer_id: str) -> AsyncGenerator[None, None]:
        """Become the one task that answers, until the block ends; an earlier one is ended and waited for.

        Raises:
            Resumed: a later task has taken over.
        """
        while (other := self._answering.get(answer_id)) is not None:
            other.end()
            await other.over.wait()
        self._answering[answer_id] = reading = _Reading()
        try:
            yield
        except asyncio.CancelledError:
            if reading.take_back():
                raise Resumed from None
            raise
        finally:
            del self._answering[answer_id]
            reading.over.set()

    def _remember(self, begun: BegunStream) -> None:
        own = self._begun.setdefault(begun.tenant, OrderedDict())
        self._count += begun.id not in own
        own[begun.id] = begun
        own.move_to_end(begun.id)
        if self._count > self._most:
            largest = max(self._begun, key=lambda tenant: len(self._begun[tenant]))
            self._begun[largest].popitem(last=False)
            self._count -= 1
            if not self._begun[largest]:
                del self._begun[largest]


class _Reading:
    """A task that answers, and may be ended by a later one."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._task = asyncio.current_task()
        self._ended = False

    def end(self) -> None:
        if not self._ended and self._task is not None:
            self._ended = True
            self._task.cancel()

    def take_back(self) -> bool:
        """Whether the current task was cancelled by `end` and by nothing else; if so, undo the cancellation."""
        return self._ended and self._task is not None and self._task.uncancel() == 0


def with_seed(request: EngineRequest) -> EngineRequest:
    """Give the request a seed derived from its id, for random sampling that names none.

    The id has 128 bits, random or hashed from a key, so the seed is as good as a drawn one, and need not be stored.
    """
    digest = hashlib.blake2b(request.id.encode(), digest_size=8, person=b"penstock seed").digest()
    return replace(request, drawn_seed=int.from_bytes(digest, "little") >> (64 - SEED_BITS))


def _keyed_id(prefix: str, tenant: str, key: str) -> str:
    """The id of the answer to which this caller gave the key.

    Raises:
        InvalidParameter: the key is malformed.
    """
    if not KEY.fullmatch(key):
        raise InvalidParameter(KEY_HEADER, f"{KEY_HEADER} must have 1 to 255 printable ASCII characters, no spaces.")
    named = f"{prefix} {tenant} {key}".encode()
    return prefix + hashlib.blake2b(named, digest_size=16, person=b"penstock key").hexdigest()


def _other_body(resumed: bool) -> HttpRefusal:
    if not resumed:
        message = f"{KEY_HEADER}: it was used for a request with another body; give each request its own."
        return HttpRefusal(REUSED, message, code="idempotency_key_reused", param=KEY_HEADER)
    message = f"{HEADER}: that stream was begun with another body; send the same one."
    return HttpRefusal(CONFLICT, message, code="stream_body_differs", param=HEADER)


def _digest(body: JsonObject) -> bytes:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).digest()
