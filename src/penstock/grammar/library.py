"""The grammars of an engine: checked at admission, cached, handed out as matchers.

A grammar is compiled first in a process of its own, which is killed when it exceeds its time or memory, and only then
in this one, into a cache bounded in bytes. Refusals are cached too, so that a bad grammar costs its price once. Safe to
call from several threads: one compiles at a time, so that a crowd of offenders takes one process's worth of the
machine; but nobody waits for that who asks for what is known, only so many may wait at all, and API keys take turns.
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
"""Of what is known of grammars: their text, and the document that is the way out of them."""
ENTRY_BYTES, ID_BYTES = 1000, 36
MOST_WAITING, MOST_WAITING_OF_A_KEY = 16, 8
"""Grammars that may wait until others have been judged."""
WAIT_SECONDS = 60.0
"""The costliest grammar takes ten seconds of processor time."""
RETRY_SECONDS = 10
"""When to come again where so many wait: a few of the costliest have been judged by then."""
SEARCHES = 60
"""States that a search for an ending may open while a request runs."""


_MOST_SOURCE = 8192
"""Tokens of a prompt, its last ones, that values may be copied from."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    size: int


class GrammarLibrary:
    """Implements `contract.ports.Grammars`. Nothing is built before the first grammar comes.

    Args:
        vocabulary: called once, when it is first needed.
        cache_bytes: most memory for compiled grammars, as the compiling process measured it.
        compiles: whether matchers are made here, and not in another process: then what passes `check` is compiled for
            them. To prepare a vocabulary for that takes up to a second, in which no other thread of Python runs.
        encode: the tokens that text is likely to be spelled in, for guesses; None spells it by longest match.
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
        self._lock = threading.Lock()  # of what is kept here; held for moments
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
        """Memory of the compiled grammars that are kept."""
        return self._size

    @property
    def bytes(self) -> int:
        """Memory of all that is kept: compiled grammars, and what is known of others."""
        return self._size + self._known_size

    def keep_within(self, most: int) -> None:
        """Keep `most` bytes: a quarter of what is known of grammars, the rest compiled ones."""
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
        """Do now what the first matcher would have to wait for; nothing where the vocabulary knows no grammars."""
        with suppress(InvalidParameter):
            self._ready()

    def close(self) -> None:
        """End the compiling process."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _start(self, grammar: Grammar, max_new_tokens: int, tenant: str = "") -> Ending:
        """A document of a grammar that compiles; the one with the fewest tokens, if the first one found is too long.

        A function of its arguments alone, so that an answer that is started again goes the same way.
        """
        verdict = self._verdict(grammar, tenant=tenant)
        if len(verdict.ending.ids) < max_new_tokens:
            return verdict.ending
        tight = self._verdict(grammar, tight=True, tenant=tenant)
        return verdict.ending if tight.error else tight.ending  # it took too long to find

    def _ready(self) -> Speller:
        with self._building:
            if self._speller is None:
                self._speller = Speller(self._vocabulary())
            return self._speller

    def _verdict(self, grammar: Grammar, tight: bool = False, tenant: str = "") -> Verdict:
        """What is known of a grammar, or what the process says.

        Raises:
            Overloaded: too many wait for it.
            Unavailable: it was lost.
        """
        known = self._known(grammar, tight)
        if known is not None:
            return known
        with self._turns.turn(tenant):
            known = self._known(grammar, tight)  # others may have asked for the same
            if known is None:
                known = self._judges().judge(grammar, tight)
                with self._lock:
                    self._verdicts[grammar, tight] = known
                    self._known_size += _size(grammar, known)
                    self._forget()
            return known

    def _judges(self) -> WorkerClient:
        """What judges grammars; whose turn it is may ask."""
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
        """A fresh matcher of a grammar that is known to compile within the limits."""
        known = self._fresh(grammar)
        if known is not None:
            return known
        with self._lock:
            compiling = self._compiling.setdefault(grammar, threading.Lock())
        with compiling:  # whoever wants the same waits, rather than do it too
            known = self._fresh(grammar)
            return known or self._compile_anew(grammar, size)

    def _compile_anew(self, grammar: Grammar, size: int) -> LLMatcher:
        """A matcher of a grammar that is kept from now on. Takes up to a second."""
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
        """A matcher of a grammar whose compiled form is kept."""
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is None:
                return None
            self._compiled.move_to_end(grammar)
            return kept.matcher.deep_copy()

    def _forget(self) -> None:
        """Drop what was asked for longest ago and is too much. To be called under the lock."""
        while self._size > self._cache_bytes:
            self._size -= self._compiled.popitem(last=False)[1].size
        while self._known_size > self._verdict_bytes:
            (grammar, _), verdict = self._verdicts.popitem(last=False)
            self._known_size -= _size(grammar, verdict)


def _size(grammar: Grammar, verdict: Verdict) -> int:
    """Bytes of memory that a verdict takes, with its grammar's text, nearly."""
    words = len(grammar.source) + len(verdict.ending_text) + len(verdict.error)
    return ENTRY_BYTES + words + ID_BYTES * len(verdict.ids)
