"""Checks an engine's grammars at admission, caches them, and hands out matchers.

A grammar is compiled first in a separate process, which is killed if it exceeds its time or memory, and only then in
this one, into a cache bounded in bytes. Refusals are cached too, so that a bad grammar costs its time once. Safe to
call from several threads. One grammar is judged at a time, so that many bad grammars occupy only one process. Requests
for known grammars do not wait for that; the others wait in a bounded queue, in which API keys take turns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from llguidance import LLMatcher

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.closing import Closer, JsonPlace
from penstock.grammar.compiling import compile_grammar
from penstock.grammar.copying import Copying
from penstock.grammar.ending import Ending
from penstock.grammar.forced_spelling import Encode, ForcedSpelling
from penstock.grammar.foresight import Foresight
from penstock.grammar.hints import hints_of
from penstock.grammar.matcher import GuidedMatcher
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Speller, Vocabulary
from penstock.grammar.worker_client import WorkerClient
from penstock.workers import Turns

__all__ = ["GrammarLibrary"]

CACHE_BYTES = 64 * 1024 * 1024
VERDICT_BYTES = 16 * 1024 * 1024
"""Memory for cached verdicts: the grammars' text, and one document of each."""
ENTRY_BYTES, ID_BYTES = 1000, 36
MOST_WAITING, MOST_WAITING_OF_A_KEY = 16, 8
"""Requests that may wait while the grammars of others are judged: in total, and per API key."""
WAIT_SECONDS = 60.0
"""How long a request waits for its turn. The costliest grammar takes ten seconds of CPU time."""
RETRY_SECONDS = 10
"""When to retry after a refusal because the queue is full: about the time that one of the costliest grammars takes."""
SEARCHES = 60
"""States that a search for an ending may expand while a request runs."""


_MOST_SOURCE = 8192
"""From how many of a prompt's last tokens values may be copied."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    size: int


class GrammarLibrary:
    """Implements `contract.ports.Grammars`. Builds nothing before the first grammar arrives.

    Args:
        vocabulary: loads the vocabulary; called when it is first needed, for this process and for the compiling one.
        cache_bytes: memory limit for compiled grammars, as the compiling process measured them.
        compiles: whether matchers are made in this process; `check` then compiles what it accepts. Preparing the
            vocabulary for that takes up to a second, during which no other Python thread runs.
        encode: the tokenizer's encode function, for guesses; None guesses by longest match.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        cache_bytes: int = CACHE_BYTES,
        *,
        compiles: bool = True,
        encode: Encode | None = None,
    ) -> None:
        self._encode = encode
        self._vocabulary = vocabulary
        self._compiles = compiles
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()  # guards the caches; held for moments
        self._building = threading.Lock()
        self._turns = Turns(
            "grammars",
            places=1,
            most_waiting=MOST_WAITING,
            key_places=1,
            key_waiting=MOST_WAITING_OF_A_KEY,
            wait_seconds=WAIT_SECONDS,
            retry_after=RETRY_SECONDS,
        )
        self._speller: Speller | None = None
        self._worker: WorkerClient | None = None
        self._verdict_bytes = VERDICT_BYTES
        self._verdicts: OrderedDict[tuple[Grammar, bool], Verdict] = OrderedDict()
        self._known_size = 0
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._size = 0
        self._compiling: dict[Grammar, threading.Lock] = {}

    @property
    def cached_bytes(self) -> int:
        """Memory of the cached compiled grammars."""
        return self._size

    @property
    def bytes(self) -> int:
        """Memory of both caches: compiled grammars and verdicts."""
        return self._size + self._known_size

    def keep_within(self, most: int) -> None:
        """Limit both caches to `most` bytes together: a quarter for verdicts, the rest for compiled grammars."""
        with self._lock:
            self._verdict_bytes = most // 4
            self._cache_bytes = most - self._verdict_bytes
            self._forget()

    def check(self, grammar: Grammar, max_new_tokens: int, tenant: str = "") -> Grammar:
        """See `contract.ports.Grammars.check`."""
        verdict = self._verdict(grammar, tenant=tenant)
        if verdict.error:
            raise InvalidParameter("structured_outputs", verdict.error, code=verdict.code)
        ending = self._start(grammar, max_new_tokens, tenant)
        need = len(ending.ids) + 1
        if need > max_new_tokens:
            message = f"the shortest document found takes {need} tokens, its end token included; "
            raise InvalidParameter("max_tokens", f"{message}only {max_new_tokens} may be generated")
        if self._compiles:
            self._compile(grammar, verdict.size)
        return replace(grammar, ending=ending.ids, size=verdict.size)

    def matcher(self, grammar: Grammar, max_new_tokens: int, prompt: Sequence[int] = ()) -> GuidedMatcher:
        """See `contract.ports.Grammars.matcher`."""
        speller = self._ready()
        place = JsonPlace() if grammar.kind is GrammarKind.JSON else None
        if grammar.ending is None:
            grammar = self.check(grammar, max_new_tokens)
        start = Ending.of(grammar.ending or (), speller)
        fresh = self._compile(grammar, grammar.size)
        closer = Closer(speller, SEARCHES, hints_of(grammar))
        source = b"".join([speller.tokens[id_] for id_ in prompt[-_MOST_SOURCE:] if id_ < len(speller.tokens)])
        foresight = Foresight(ForcedSpelling(speller, self._encode), Copying(source))
        return GuidedMatcher(fresh, speller, closer, place, start, max_new_tokens, foresight)

    def prepare(self) -> None:
        """Prepare the vocabulary before the first matcher needs it; does nothing if it does not support grammars."""
        with suppress(InvalidParameter):
            self._ready()

    def close(self) -> None:
        """End the compiling process."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _start(self, grammar: Grammar, max_new_tokens: int, tenant: str = "") -> Ending:
        """A document of a grammar that compiles; the one with the fewest tokens if the first one found is too long.

        Depends on its arguments alone, so that a restarted answer takes the same course.
        """
        verdict = self._verdict(grammar, tenant=tenant)
        if len(verdict.ending.ids) < max_new_tokens:
            return verdict.ending
        tight = self._verdict(grammar, tight=True, tenant=tenant)
        return verdict.ending if tight.error else tight.ending  # the search took too long

    def _ready(self) -> Speller:
        with self._building:
            if self._speller is None:
                self._speller = Speller(self._vocabulary())
            return self._speller

    def _verdict(self, grammar: Grammar, tight: bool = False, tenant: str = "") -> Verdict:
        """The cached verdict on a grammar, or a new one from the compiling process.

        Raises:
            Overloaded: too many requests wait, or this one waited too long.
            Unavailable: the process was lost twice, or cannot be started.
        """
        known = self._known(grammar, tight)
        if known is not None:
            return known
        with self._turns.turn(tenant):
            known = self._known(grammar, tight)  # another thread may have asked for the same verdict
            if known is None:
                known = self._judges().judge(grammar, tight)
                with self._lock:
                    self._verdicts[grammar, tight] = known
                    self._known_size += _size(grammar, known)
                    self._forget()
            return known

    def _judges(self) -> WorkerClient:
        """The client of the compiling process. Only the thread that has the turn may call this."""
        with self._lock:
            if self._worker is not None:
                return self._worker
        worker = WorkerClient(self._vocabulary())
        with self._lock:
            self._worker = worker
        return worker

    def _known(self, grammar: Grammar, tight: bool) -> Verdict | None:
        with self._lock:
            known = self._verdicts.get((grammar, tight))
            if known is not None:
                self._verdicts.move_to_end((grammar, tight))
            return known

    def _compile(self, grammar: Grammar, size: int) -> LLMatcher:
        """A fresh matcher of a grammar known to compile within the limits."""
        known = self._fresh(grammar)
        if known is not None:
            return known
        with self._lock:
            compiling = self._compiling.setdefault(grammar, threading.Lock())
        with compiling:  # a thread that wants the same grammar waits instead of compiling it too
            known = self._fresh(grammar)
            return known or self._compile_anew(grammar, size)

    def _compile_anew(self, grammar: Grammar, size: int) -> LLMatcher:
        """Compile a grammar, cache it and return a fresh matcher of it. Takes up to a second."""
        try:
            matcher = compile_grammar(grammar, self._ready())
            with self._lock:
                if grammar not in self._compiled:
                    self._compiled[grammar] = _Compiled(matcher, size)
                    self._size += size
                self._forget()
        finally:
            with self._lock:
                self._compiling.pop(grammar, None)
        return matcher.deep_copy()

    def _fresh(self, grammar: Grammar) -> LLMatcher | None:
        """A fresh matcher of a grammar whose compiled form is cached; None if it is not."""
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is None:
                return None
            self._compiled.move_to_end(grammar)
            return kept.matcher.deep_copy()

    def _forget(self) -> None:
        """Evict the least recently used entries beyond the limits. Must be called under the lock."""
        while self._size > self._cache_bytes:
            self._size -= self._compiled.popitem(last=False)[1].size
        while self._known_size > self._verdict_bytes:
            (grammar, _), verdict = self._verdicts.popitem(last=False)
            self._known_size -= _size(grammar, verdict)


def _size(grammar: Grammar, verdict: Verdict) -> int:
    """Approximate memory of a verdict and its grammar's text, in bytes."""
    words = len(grammar.source) + len(verdict.ending_text) + len(verdict.error)
    return ENTRY_BYTES + words + ID_BYTES * len(verdict.ids)
