"""The grammars of an engine: checked at admission, cached, handed out as matchers.

A grammar is compiled first in a process of its own, which is killed when it exceeds its time or memory, and only then
in this one, into a cache bounded in bytes. Refusals are cached too, so that a bad grammar costs its price once. Safe to
call from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from penstock.contract.errors import EngineFault, InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.closing import Closer, JsonPlace
from penstock.grammar.compiling import compile_grammar
from penstock.grammar.ending import Ending
from penstock.grammar.hints import hints_of
from penstock.grammar.matcher import GuidedMatcher
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Speller, Vocabulary
from penstock.grammar.worker_client import WorkerClient

__all__ = ["GrammarLibrary"]

CACHE_BYTES = 64 * 1024 * 1024
MAX_VERDICTS = 4096
SEARCHES = 60
"""States that a search for an ending may open while a request runs."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    size: int


class GrammarLibrary:
    """Implements `contract.ports.Grammars`. Nothing is built before the first grammar comes.

    Args:
        vocabulary: called once, when it is first needed.
        cache_bytes: most memory for compiled grammars, as the compiling process measured it.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        self._lock = threading.RLock()
        self._speller: Speller | None = None
        self._worker: WorkerClient | None = None
        self._verdicts: OrderedDict[tuple[Grammar, bool], Verdict] = OrderedDict()
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._size = 0

    @property
    def cached_bytes(self) -> int:
        """Memory of the compiled grammars that are kept."""
        return self._size

    def check(self, grammar: Grammar, max_new_tokens: int) -> None:
        """See `contract.ports.Grammars.check`."""
        verdict = self._verdict(grammar)
        if verdict.error:
            raise InvalidParameter("structured_outputs", verdict.error, code=verdict.code)
        need = len(self._start(grammar, max_new_tokens).ids) + 1
        if need > max_new_tokens:
            message = f"the shortest document found takes {need} tokens, its end token included; "
            raise InvalidParameter("max_tokens", f"{message}only {max_new_tokens} may be generated")

    def matcher(self, grammar: Grammar, max_new_tokens: int) -> GuidedMatcher:
        """See `contract.ports.Grammars.matcher`."""
        verdict = self._verdict(grammar)
        if verdict.error:
            raise EngineFault("a grammar that was accepted at admission cannot be compiled any more")
        speller = self._ready()
        place = JsonPlace() if grammar.kind is GrammarKind.JSON else None
        fresh = self._compile(grammar, verdict.size)
        closer = Closer(speller, SEARCHES, hints_of(grammar))
        return GuidedMatcher(fresh, speller, closer, place, self._start(grammar, max_new_tokens), max_new_tokens)

    def close(self) -> None:
        """End the compiling process."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _start(self, grammar: Grammar, max_new_tokens: int) -> Ending:
        """A document of a grammar that compiles; the one with the fewest tokens, if the first one found is too long.

        A function of its arguments alone, so that an answer that is started again goes the same way.
        """
        verdict = self._verdict(grammar)
        if len(verdict.ending.ids) < max_new_tokens:
            return verdict.ending
        tight = self._verdict(grammar, tight=True)
        return verdict.ending if tight.error else tight.ending  # it took too long to find

    def _ready(self) -> Speller:
        with self._lock:
            if self._speller is None:
                self._speller = Speller(self._vocabulary())
            return self._speller

    def _verdict(self, grammar: Grammar, tight: bool = False) -> Verdict:
        self._ready()
        with self._lock:  # one compiles at a time: a crowd of offenders takes one process's worth of the machine
            known = self._verdicts.get((grammar, tight))
            if known is None:
                if self._worker is None:
                    self._worker = WorkerClient(self._vocabulary())
                known = self._verdicts[grammar, tight] = self._worker.judge(grammar, tight)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end((grammar, tight))
            return known

    def _compile(self, grammar: Grammar, size: int) -> LLMatcher:
        """A fresh matcher of a grammar that is known to compile within the limits."""
        with self._lock:
            kept = self._compiled.pop(grammar, None)
            if kept is None:
                kept = _Compiled(compile_grammar(grammar, self._ready()), size)
                self._size += size
            self._compiled[grammar] = kept
            while self._size > self._cache_bytes:
                self._size -= self._compiled.popitem(last=False)[1].size
            return kept.matcher.deep_copy()
