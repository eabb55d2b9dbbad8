"""Keeps computed answers for requests that would get the same answer again.

An answer is a function of its request and of what a certificate names, so a cached answer is what would be computed,
bit for bit. Only whole answers are kept whose requests leave nothing to chance: greedy ones, and random ones whose
caller gave a seed. A tenant finds only its own answers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import NamedTuple

import msgspec

from penstock.contract.events import CacheLookup, ChoiceDelta, ChoiceFinished, FinishReason, Output, RequestFinished
from penstock.contract.measurements import AnswerCacheUse, Timings
from penstock.contract.ports import Clock
from penstock.contract.request import EngineRequest
from penstock.engine.certifier import WHOLE, certified_request
from penstock.engine.certifying import Certifying
from penstock.engine.intake import ResolvedRequest
from penstock.engine.written_outputs import read_outputs, write_outputs
from penstock.text import ReplyReader

__all__ = ["ENTRY_BYTES", "AnswerCache", "AnswerLookup", "CachedAnswers"]

ENTRY_BYTES = 512
"""Approximate bytes of an answer beside its messages, with CPython 3.11: its key, its place in the order, its time."""
_PIECE = 64
"""Outputs per message. A message is decoded as a whole, and its reader may be slow."""

_encode = msgspec.msgpack.Encoder(order="sorted").encode


class _Entry(NamedTuple):
    messages: tuple[bytes, ...]
    at: float

    @property
    def bytes(self) -> int:
        return sum(map(len, self.messages)) + ENTRY_BYTES


class AnswerCache:
    """Holds answers by key; evicts the least recently used one. Confined to one event loop.

    Args:
        most_bytes: maximum bytes of all answers together.

    Attributes:
        bytes: bytes of all answers now.
        evicted: number of answers evicted so far.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes, since: float) -> tuple[tuple[bytes, ...], float] | None:
        """The messages under a key, and when they were kept; None if there are none, or they are older than `since`."""
        entry = self._entries.get(key)
        if entry is None or entry.at < since:
            return None
        self._entries.move_to_end(key)
        return entry

    def keep(self, key: bytes, messages: tuple[bytes, ...], now: float) -> None:
        """Keep an answer, in place of any under the same key. An answer larger than the cache is not kept."""
        self._drop(key)
        entry = _Entry(messages, now)
        if entry.bytes > self.most_bytes:
            return
        while self.bytes + entry.bytes > self.most_bytes:
            self._drop(next(iter(self._entries)))
            self.evicted += 1
        self._entries[key] = entry
        self.bytes += entry.bytes

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.bytes


class CachedAnswers:
    """The answers of one model, in a cache that other models may share.

    Args:
        cache: where the answers are.
        certifying: what the answers depend on beside their requests.
        clock: the engine's clock.
    """

    def __init__(self, cache: AnswerCache, certifying: Certifying, clock: Clock) -> None:
        self.cache = cache
        self.clock = clock
        self.hits = 0
        self.queries = 0
        self._contract = _encode(astuple(certifying.contract))

    def look_up(self, request: EngineRequest, resolved: ResolvedRequest) -> AnswerLookup | None:
        """Look for the answer to a request; None if the request leaves something to chance."""
        if not _says_all(request):
            return None
        self.queries += 1
        lookup = AnswerLookup(self, self._key(request, resolved), request, resolved)
        self.hits += lookup.hit
        return lookup

    def use(self) -> AnswerCacheUse:
        """How much the cache was used so far."""
        return AnswerCacheUse(self.queries, self.hits, self.cache.bytes, self.cache.evicted)

    def _key(self, request: EngineRequest, resolved: ResolvedRequest) -> bytes:
        """A hash of everything that the outputs depend on, and of who may see them."""
        seen = resolved.sequences[0].sampling.entries, resolved.echo, resolved.certified, resolved.prompt_text
        whole = (self._contract, request.tenant, request.cache_salt, seen, certified_request(resolved))
        return hashlib.sha256(_encode(whole)).digest()


class AnswerLookup:
    """One request's answer: found in the cache, or kept when it is complete. Owned by the stream of its outputs."""

    def __init__(self, answers: CachedAnswers, key: bytes, request: EngineRequest, resolved: ResolvedRequest) -> None:
        self._answers = answers
        self._key = key
        self._resolved = resolved
        self._keep = request.answer_caching.keep
        self._ends: list[FinishReason] = []
        self._waiting: list[Output] = []
        self._messages: list[bytes] = []
        self._size = 0
        self._now = answers.clock.now()
        self._found = answers.cache.find(key, self._now - request.answer_caching.most_age)

    @property
    def hit(self) -> bool:
        """Whether the answer was found."""
        return self._found is not None

    def told(self) -> CacheLookup:
        """The output that precedes the answer: how old the cached answer is, or that there is none."""
        return CacheLookup(None if self._found is None else self._now - self._found[1])

    def pieces(self) -> Iterator[list[Output]]:
        """The cached answer, as if it was computed now: its times, and the ids of its calls, are this request's."""
        assert self._found is not None, "the answer was not found"
        for message in self._found[0]:
            yield list(map(self._own, read_outputs(message)))

    def _own(self, output: Output) -> Output:
        reader, request_id = self._resolved.reader, self._resolved.id
        match output:
            case RequestFinished():
                arrived = self._resolved.sequences[0].arrival
                return replace(output, timings=Timings(arrived, self._now, self._now, self._now, self._now))
            case ChoiceDelta(calls=calls) if calls and reader is not None:
                return _with_call_ids(output, reader, request_id)
        return output

    def note(self, output: Output) -> None:
        """Take the next output of an answer that is computed; after the last output the answer is kept."""
        if not self._keep:
            return
        if isinstance(output, ChoiceFinished):
            self._ends.append(output.reason)
        self._waiting.append(output)
        ended = isinstance(output, RequestFinished)
        if ended or len(self._waiting) >= _PIECE:
            self._messages.append(write_outputs(self._waiting))
            self._size += len(self._messages[-1])
            self._waiting.clear()
        if self._size > self._answers.cache.most_bytes:
            self._keep = False
            self._messages.clear()
        elif ended and len(self._ends) == self._resolved.answered and WHOLE.issuperset(self._ends):
            self._answers.cache.keep(self._key, tuple(self._messages), self._answers.clock.now())


def _says_all(request: EngineRequest) -> bool:
    """Whether a request generates tokens and leaves nothing about them to chance."""
    greedy = request.sampling.get("temperature", 1.0) == 0
    return request.embedding is None and (greedy or request.sampling.has("seed"))


def _with_call_ids(delta: ChoiceDelta, reader: ReplyReader, request_id: str) -> ChoiceDelta:
    """The delta with ids of calls that no other answer has."""
    seq_id = f"{request_id}/{delta.choice}"
    return delta._replace(
        calls=tuple(replace(each, id=reader.call_id(seq_id, each.index)) if each.id else each for each in delta.calls)
    )
