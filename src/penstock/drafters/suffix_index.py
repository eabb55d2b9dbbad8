"""Finds where the end of one token sequence occurred before in another, and what followed it there.

SAM decoding (Hu et al. 2024) and SuffixDecoding (Oliaro et al. 2024) use suffix automata and suffix trees for this.
Here it is a table from every two consecutive tokens to their last occurrence, with a link from each occurrence to the
one before. It costs one entry per token, and forgetting drops it as a whole; the few occurrences found are compared
token by token for the longest match. Knows no requests and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["GRAM", "LONGEST", "TOKEN_BYTES", "Match", "SuffixIndex"]

GRAM = 2
"""Consecutive tokens that must match. Two may match by chance, but such guesses were right more often than not in the
answers that were examined, and the user of a guess knows the length of its match."""

_PLACES = 16
"""Occurrences that are compared, latest first."""

LONGEST = 64
"""Most tokens that are compared; the latest occurrence that matches in this many is taken."""


_PLACE_BYTES = 80
_GRAM_BYTES = 118
"""Bytes that CPython takes for a token: its places in two lists 16, two integers 64; and for a pair of tokens that is
new: a tuple 56, an entry of the dictionary 36 to 62."""

TOKEN_BYTES = _PLACE_BYTES + _GRAM_BYTES
"""Most bytes that a token of an index takes."""


class Match(NamedTuple):
    """An earlier occurrence of the tokens looked for.

    Attributes:
        end: the index of the token after it.
        length: how many tokens before `end` are the same; at least `GRAM`.
    """

    end: int
    length: int


class SuffixIndex:
    """Tokens that are searched for the ends of sequences; only grows."""

    __slots__ = ("_earlier", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}  # two tokens -> the index after their last occurrence
        self._earlier: list[int] = []  # at i, the end of the occurrence before that at i + GRAM; 0 for none

    @property
    def bytes(self) -> int:
        """Memory of the index, at most."""
        return len(self.tokens) * _PLACE_BYTES + len(self._last) * _GRAM_BYTES

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; takes a third of a microsecond each."""
        known = self.tokens
        known.extend(tokens)
        last, earlier = self._last, self._earlier
        first = len(earlier)
        for end, gram in enumerate(pairwise(known[first:]), first + GRAM):
            earlier.append(last.get(gram, 0))
            last[gram] = end

    def match(self, tokens: Sequence[int]) -> Match | None:
        """The occurrence that matches most tokens at the end of `tokens`, among equals the latest; None if none does.

        If `tokens` is the index's own list, the end itself does not count.
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
        """`count` tokens from index `end` on, repeated if fewer follow; () if none follows.

        Repeating them guesses a sequence that repeats itself beyond its known tokens.
        """
        following = self.tokens[end : end + count]
        if not following:
            return ()
        while len(following) < count:
            following += following[: count - len(following)]
        return tuple(following)

    def _agreement(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before `end`, at most `LONGEST`, match the end of `tokens`; `GRAM` are known to match."""
        known, length = self.tokens, GRAM
        most = min(LONGEST, end, len(tokens))
        while length < most and known[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length
