"""The compiling process: grammars in, verdicts out, one line each.

`worker_client` starts it and may kill it. Its memory is limited once the vocabulary is read, and its CPU time for each
grammar. A grammar that exceeds a limit kills this process and harms no other part of the engine.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from llguidance import LLMatcher

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.closing import Closer, JsonPlace
from penstock.grammar.compiling import compile_grammar
from penstock.grammar.ending import Ending
from penstock.grammar.fewest import TooFar, Unreadable, fewest_tokens
from penstock.grammar.hints import hints_of
from penstock.grammar.shortest import ShortestSearch
from penstock.grammar.verdict import Verdict
from penstock.grammar.vocabulary import Speller, Vocabulary
from penstock.workers.child import address_space, limit_time, serve_orders

__all__ = ["MEMORY_BYTES", "SEARCHES", "SEARCH_CPU_SECONDS", "judge", "main"]

SEARCH_CPU_SECONDS = 8
"""For the search for the fewest tokens, which runs only if the first search finds no document, or none that fits."""
MEMORY_BYTES = 512 * 1024 * 1024
"""Address space beyond what the process needs for its vocabulary."""
SEARCHES = 2000
"""States that a breadth-first search for a short document may expand."""
TIGHT_SEARCHES = 12
"""States that the search for the shortest document may expand to complete one of its own states."""
MOST_TOKENS = 1000
"""A document must have fewer tokens than this if no other search has found one."""
LEAST_SIZE, SOURCE_SIZE = 140_000, 70
"""Least memory, in bytes, that a compiled grammar is taken to use: a constant plus an amount per character of source,
measured on 200 schemas. The growth of the address space says too little, because a process reuses freed memory."""
WALKS, WALK_TOKENS = 4, 30
"""How many random prefixes of answers, and how many tokens of each, test whether a grammar can be followed."""
WALK_CPU_SECONDS = 0.5


def main() -> None:
    """Serve standard input until its end."""
    serve_orders(_begin, MEMORY_BYTES)


def _begin(hello: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that judges grammars over the given vocabulary."""
    tokens = tuple(base64.b64decode(token) for token in hello["tokens"])
    try:
        speller = Speller(Vocabulary(tokens, tuple(hello["special"]), tuple(hello["eos"])))
    except InvalidParameter as error:
        refusal = asdict(Verdict(error=error.message, code=error.code))
        return lambda _: refusal

    def answer(given: dict[str, Any]) -> dict[str, Any]:
        grammar = Grammar(GrammarKind(given["kind"]), given["source"])
        return asdict(judge(grammar, speller, given["tight"], more_time=lambda: limit_time(SEARCH_CPU_SECONDS)))

    return answer


def judge(
    grammar: Grammar, speller: Speller, tight: bool = False, more_time: Callable[[], None] = lambda: None
) -> Verdict:
    """Compile `grammar` and look for a short document of it.

    Args:
        grammar: what a caller sent.
        speller: the vocabulary.
        tight: look for the document with the fewest tokens, which takes longer; also done if no document was found.
        more_time: called before that longer search begins.
    """
    before = address_space()
    try:
        matcher = compile_grammar(grammar, speller)
    except InvalidParameter as error:
        return Verdict(error=error.message, code=error.code)
    is_json, hints = grammar.kind is GrammarKind.JSON, hints_of(grammar)
    text = Closer(speller, SEARCHES, hints).ending(matcher, JsonPlace() if is_json else None)
    ending = None if text is None else Ending.spelled(text, speller)
    size = max(address_space() - before, LEAST_SIZE + SOURCE_SIZE * len(grammar.source))
    if ending is None or tight:
        more_time()
        ending = _shortest(grammar, matcher, speller, ending)
    if ending is None or not _is_document(matcher, (*ending.ids, speller.eos[0])):
        return Verdict(error="no document of this grammar was found: it allows none, or only very long ones")
    if not _can_be_followed(matcher, ending.ids, len(speller.tokens)):
        return Verdict(error="this grammar is too complex to be followed token by token", code="grammar_too_complex")
    return Verdict(ending_text=ending.text.decode("latin-1"), ids=ending.ids, size=size)


def _shortest(grammar: Grammar, matcher: LLMatcher, speller: Speller, known: Ending | None) -> Ending | None:
    """The document with the fewest tokens if `fewest` can read the grammar, else the shortest one found.

    Returns `known` if nothing shorter is found.
    """
    try:
        ids = fewest_tokens(grammar, speller.trie, MOST_TOKENS if known is None else len(known.ids))
    except (Unreadable, TooFar):
        return _shortest_found(grammar, matcher, speller, known)
    if ids is None:
        return known
    if speller.completes(matcher, ids):
        return Ending(b"".join(speller.tokens[id_] for id_ in ids), ids)
    return _shortest_found(grammar, matcher, speller, known)


def _shortest_found(grammar: Grammar, matcher: LLMatcher, speller: Speller, known: Ending | None) -> Ending | None:
    if known is None:
        return None
    closer = Closer(speller, TIGHT_SEARCHES, hints_of(grammar))
    return ShortestSearch(speller).shortest(matcher, closer, grammar.kind is GrammarKind.JSON, known)


def _is_document(matcher: LLMatcher, ids: tuple[int, ...]) -> bool:
    return bool(matcher.validate_tokens(list(ids)) == len(ids))


def _can_be_followed(matcher: LLMatcher, ids: tuple[int, ...], tokens: int) -> bool:
    """Whether llguidance can follow a grammar along one document and along some random prefixes.

    llguidance has limits of its own, which a large grammar may exceed at any point: it then rejects a token that it
    allowed, or cannot compute a mask. Random prefixes find the grammars that do so in most answers.
    """
    if not _follows(matcher.deep_copy(), iter(ids)):
        return False
    started, draw = time.process_time(), random.Random(0)  # noqa: S311 (no secret: the same verdict each time)
    for _ in range(WALKS):
        if time.process_time() - started > WALK_CPU_SECONDS:
            break
        walker = matcher.deep_copy()
        if not _follows(walker, _random_tokens(walker, draw, tokens)):
            return False
    return True


def _follows(walker: LLMatcher, ids: Iterator[int]) -> bool:
    return all(walker.consume_token(id_) for id_ in ids) and not walker.is_error()


def _random_tokens(walker: LLMatcher, draw: random.Random, tokens: int) -> Iterator[int]:
    """Up to WALK_TOKENS tokens, each drawn from the walker's mask at that point; ends where the document ends."""
    for _ in range(WALK_TOKENS):
        if walker.is_stopped():
            return
        mask = walker.compute_bitmask()[: (tokens + 7) // 8]
        start = draw.randrange(len(mask))
        rest = (mask[start:] + mask[:start]).lstrip(b"\0")
        if not rest:
            return
        byte = (start - len(rest)) % len(mask)
        yield byte * 8 + draw.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


if __name__ == "__main__":
    main()
