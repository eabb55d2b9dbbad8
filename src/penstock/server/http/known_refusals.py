"""Refusing again, without the application, what it has just refused because the queue is full.

Beside ten times the load that can be served, nine of ten requests are refused, and what a refusal takes is taken from
those that are answered. So a head that the application has judged (host, key, path, length) is known by its digest, and
the same head, with its whole body behind it, is answered from that while the queue is still full. A body that comes
after its head, as some clients write it, goes the long way.

Invariant: the answer is the application's own, but for the date, the request's id, and what the queue is like by now.
A head whose answer could not be repeated to the byte is not known, whichever middleware made it another.
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
"""That are known: a client of one kind and key has a few, which differ by the length of the body."""
MOST_HEAD_BYTES = 4096
END_OF_HEAD = b"\r\n\r\n"
REQUEST_ID = b"x-request-id"
SCOPE_KEY = "penstock.refused_unread"

Pairs = Iterable[tuple[bytes, bytes]]


class Begun(NamedTuple):
    """What is remembered of the first bytes of a request; not the bytes, which may be a body of megabytes, or a key.

    Attributes:
        digest: of its head; b"" if that is not whole, or too long to be known.
        behind: how many bytes came behind it.
    """

    digest: bytes
    behind: int

    @classmethod
    def of(cls, data: bytes) -> Begun:
        """With these bytes."""
        end = data.find(END_OF_HEAD, 0, MOST_HEAD_BYTES)
        if end < 0:
            return NOT_BEGUN
        return cls(hashlib.sha256(data[:end]).digest(), len(data) - end - len(END_OF_HEAD))


NOT_BEGUN = Begun(b"", 0)


@dataclass(slots=True)
class Refused:
    """One request that was refused unread; in its ASGI scope.

    Attributes:
        tenant: whose part of the queue was full.
        refusal: what was answered.
        body_bytes: that its head declares.
        tell: called with the id of each that is refused like it, for whoever observes requests.
    """

    tenant: str
    refusal: Overloaded
    body_bytes: int
    tell: Callable[[str, Overloaded], None] | None = None


def refused_unread(scope: Mapping[str, Any]) -> Refused | None:
    """What is noted in the scope of a request that was refused unread; None for any other."""
    noted: Refused | None = scope.get(SCOPE_KEY)
    return noted


class KnownRefusals:
    """The heads of one application's. Confined to its event loop.

    Args:
        check: raises `Overloaded` if the queue has no room for anything of this tenant.
        stopping: from then on nothing is known: the server refuses for another reason.
    """

    def __init__(self, check: Callable[[str], None], stopping: asyncio.Event) -> None:
        self._check = check
        self._stopping = stopping
        self._heads: dict[bytes, Refused] = {}

    def learn(self, begun: Begun, answer: bytes, refused: Refused, common: Pairs) -> None:
        """A request was refused with these bytes; `common` headers are in every answer."""
        if not begun.digest or begun.behind != refused.body_bytes:
            return
        if answer == _answer(refused.refusal, _header(answer, REQUEST_ID), common):
            if len(self._heads) == MOST_HEADS:
                del self._heads[next(iter(self._heads))]  # the oldest; one that still comes is soon known again
            self._heads[begun.digest] = refused

    def answer(self, begun: Begun, common: Pairs) -> bytes | None:
        """The answer to a request that is refused as one before it; None where the application is to be asked."""
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
    """The value of a header in an answer's bytes; b"" where there is none."""
    return answer.partition(b"\r\n" + name + b": ")[2].partition(b"\r\n")[0]


def _answer(refusal: Overloaded, request_id: bytes, common: Pairs) -> bytes:
    """The whole answer."""
    before, after = _around_id(refusal.message, refusal.retry_after, tuple(common))
    return b"%b%b%b" % (before, request_id, after)


@lru_cache(maxsize=16)
def _around_id(message: str, retry_after: int, common: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bytes]:
    """What stands before the request's id in an answer, and behind it: for a second, most often the same."""
    response = error_response(Overloaded(message, retry_after=retry_after))
    lines = b"".join(b"%b: %b\r\n" % pair for pair in (*common, *response.raw_headers))
    before = b"HTTP/1.1 429 Too Many Requests\r\n%b%b: " % (lines, REQUEST_ID)
    return before, b"\r\n\r\n%b" % bytes(response.body)
