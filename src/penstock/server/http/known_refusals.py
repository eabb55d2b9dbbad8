"""Repeat refusals for a full queue without calling the application.

At ten times the load that can be served, nine of ten requests are refused, and the time that refusals take is lost to
the requests that are served. So a request head that the application has judged (host, key, path, length) is remembered
by its digest, and the same head, followed at once by its whole body, is refused from that record while the queue is
still full. If the body arrives after the head, as some clients send it, the application handles the request.

Invariant: the response is the application's own, except for the date, the request id, and the present state of the
queue. A head is not remembered if its response cannot be repeated byte for byte, whichever middleware changed it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.contract.errors import Overloaded
from penstock.server.http.envelope import new_request_id
from penstock.server.http.failures import error_response

__all__ = ["NOT_BEGUN", "Begun", "KnownRefusals", "Refused", "refused_unread"]

MOST_HEADS = 256
"""How many heads are remembered: a client of one kind and key sends a few, which differ by the body's length."""
MOST_HEAD_BYTES = 4096
END_OF_HEAD = b"\r\n\r\n"
REQUEST_ID = b"x-request-id"
SCOPE_KEY = "penstock.refused_unread"

Pairs = Iterable[tuple[bytes, bytes]]


class Begun(NamedTuple):
    """A summary of the first bytes of a request, without the bytes: they may be megabytes of body, or contain a key.

    Attributes:
        digest: SHA-256 of the head; b"" if the head is incomplete or too long.
        behind: how many bytes followed the head.
    """

    digest: bytes
    behind: int

    @classmethod
    def of(cls, data: bytes) -> Begun:
        """Summarise a request that begins with these bytes."""
        end = data.find(END_OF_HEAD, 0, MOST_HEAD_BYTES)
        if end < 0:
            return NOT_BEGUN
        return cls(hashlib.sha256(data[:end]).digest(), len(data) - end - len(END_OF_HEAD))


NOT_BEGUN = Begun(b"", 0)


@dataclass(slots=True)
class Refused:
    """A request that was refused unread; noted in its ASGI scope.

    Attributes:
        tenant: whose part of the queue was full.
        refusal: the error it was answered with.
        body_bytes: the body length that its head declares.
        tell: called with the id and the error of each repeated refusal, for observers.
    """

    tenant: str
    refusal: Overloaded
    body_bytes: int
    tell: Callable[[str, Overloaded], None] | None = None


def refused_unread(scope: Mapping[str, Any]) -> Refused | None:
    """The `Refused` in the scope of a request that was refused unread; None for any other request."""
    noted: Refused | None = scope.get(SCOPE_KEY)
    return noted


class KnownRefusals:
    """The remembered heads of one application. Confined to its event loop.

    Args:
        check: raises `Overloaded` if the queue has no room for even a smallest request of this tenant.
        stopping: once set, no refusal is repeated: the server refuses for another reason.
    """

    def __init__(self, check: Callable[[str], None], stopping: asyncio.Event) -> None:
        self._check = check
        self._stopping = stopping
        self._heads: dict[bytes, Refused] = {}

    def learn(self, begun: Begun, answer: bytes, refused: Refused, common: Pairs) -> None:
        """Remember a refused request, if its response can be repeated; `common` headers are in every response."""
        if not begun.digest or begun.behind != refused.body_bytes:
            return
        if answer == _answer(refused.refusal, _header(answer, REQUEST_ID), common):
            if len(self._heads) == MOST_HEADS:
                del self._heads[next(iter(self._heads))]  # the oldest; a head still in use is soon learned again
            self._heads[begun.digest] = refused

    def answer(self, begun: Begun, common: Pairs) -> bytes | None:
        """The response to a request that is refused like an earlier one; None if the application must be asked."""
        if not self._heads or self._stopping.is_set():
            return None
        known = self._heads.get(begun.digest)
        if known is None or known.tell is None or begun.behind != known.body_bytes:
            return None
        try:
            self._check(known.tenant)
        except Overloaded as refusal:
            request_id = new_request_id()
            known.tell(request_id, refusal)
            return _answer(refusal, request_id.encode(), common)
        return None


def _header(answer: bytes, name: bytes) -> bytes:
    """The value of a header in a response's bytes; b"" if there is none."""
    return answer.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


def _answer(refusal: Overloaded, request_id: bytes, common: Pairs) -> bytes:
    """The complete response to a refused request."""
    before, after = _around_id(refusal.message, refusal.retry_after, tuple(common))
    return b"%b%b%b" % (before, request_id, after)


@lru_cache(maxsize=16)
def _around_id(message: str, retry_after: int, common: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bytes]:
    """The response before and after the request id. Cached: within a second it is mostly the same."""
    response = error_response(Overloaded(message, retry_after=retry_after))
    lines = b"".join(b"%b: %b\r\n" % pair for pair in (*common, *response.raw_headers))
    before = b"HTTP/1.1 429 Too Many Requests\r\n%b%b: " % (lines, REQUEST_ID)
    return before, b"\r\n\r\n%b" % bytes(response.body)
