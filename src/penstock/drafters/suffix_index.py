"""Where the end of one token sequence stood before in another, and what came after it there.

What suffix automata and suffix trees answer in SAM decoding (Hu et al. 2024) and SuffixDecoding (Oliaro et al. 2024).
Here it is a table from every two tokens in a row to where they stood last, with a link from each place to the one
before it: it costs one entry a token, forgets by being dropped, and the few places it names are compared token by token
for the longest match. Knows no sequences and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["GRAM", "LONGEST", "Match", "SuffixIndex"]

GRAM = 2
"""Tokens in a row that must be the same. Two are the same by chance too, but right more often than not in the answers
that were looked at, and whoever uses a guess knows how much speaks for it."""

_PLACES = 16
"""Places that are compared, the latest ones."""

LONGEST = 64
"""Of places that agree on so many tokens, the latest is taken."""


class Match(NamedTuple):
    """A place where what is looked for ended before.

    Attributes:
        end: the index of the token after it.
        length: how many tokens before `end` are the same; at least `GRAM`.
    """

    end: int
    length: int


class SuffixIndex:
    """Tokens in which the ends of sequences are looked for. It only grows."""

    __slots__ = ("_earlier", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}  # two tokens -> the index after their last place
        self._earlier: list[int] = []  # of the place that ends at index i + GRAM: the one before it; 0 for none

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end. Takes a third of a microsecond each."""
        known = self.tokens
        known.extend(tokens)
        last, earlier = self._last, self._earlier
        first = len(earlier)
        for end, gram in enumerate(pairwise(known[first:]), first + GRAM):
            earlier.append(last.get(gram, 0))
            last[gram] = end

    def match(self, tokens: Sequence[int]) -> Match | None:
        """Where the end of `tokens` stood last with the most of what is before it; None where two tokens never did.

        Where `tokens` are the index's own, their end itself is no such place.
        """
        if len(tokens) < GRAM:
            return None
        end = self._last.get((tokens[-2], tokens[-1]), 0)
        if tokens is self.tokens:
            end = self._earlier[-1]
        best: Match | None = None
        for _ in range(_PLACES):
            if not end:
                break
            length = self._agreement(tokens, end)
            if best is None or length > best.length:
                best = Match(end, length)
                if length >= LONGEST:
                    break
            end = self._earlier[end - GRAM]
        return best

    def after(self, end: int, count: int) -> tuple[int, ...]:
        """At most `count` tokens from `end` on; what is known ends there and goes on as a loop of what follows `end`.

        So a sequence that repeats itself is guessed beyond what was repeated yet.
        """
        following = self.tokens[end : end + count]
        if not following:
            return ()
        while len(following) < count:
            following += following[: count - len(following)]
        return tuple(following)

    def _agreement(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before `end` equal those before the end of `tokens`, of which `GRAM` are known to."""
        known, length = self.tokens, GRAM
        most = min(LONGEST, end, len(tokens))
        while length < most and known[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length
