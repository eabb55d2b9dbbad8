"""Guesses the next tokens where a grammar leaves hardly any choice: property names, punctuation, constants.

These are guesses, never masks: even for forced text the model chooses the tokens, and JSON may have a space in front
or not. If this answer has met the same mask before, the guess is the token that it took there last. Otherwise forced
text is spelled (`forced_spelling`) except for its last token; for that one, and where only a space is optional, the
guess is the longest token that fits. Values in progress are guessed from the same words in the prompt (`copying`).
"""

from __future__ import annotations

from llguidance import LLMatcher

from penstock.grammar.closing import JsonPlace
from penstock.grammar.copying import Copying, value_in
from penstock.grammar.forced_spelling import ForcedSpelling

__all__ = ["TAIL", "Foresight"]

TAIL = 64
"""How many of an answer's last bytes the guesses look at."""
_FEW = 128
"""A mask is narrow if it allows at most this many tokens."""
_SPACED = b",:"
"""Bytes after which models write a space."""
_REMEMBERED = 128
"""The most masks that an answer remembers in each of two tables; a mask has one bit per token of the vocabulary."""


class Foresight:
    """Guesses next tokens along one answer. Owned by its matcher.

    Args:
        spelling: spells forced text.
        copying: finds in the prompt how a value continues.
    """

    __slots__ = ("_begin_alike", "_came", "_copying", "_speller", "_spelling")

    def __init__(self, spelling: ForcedSpelling, copying: Copying) -> None:
        self._spelling = spelling
        self._copying = copying
        self._speller = spelling.speller
        self._begin_alike: dict[bytes, list[int]] = {}  # a mask -> its `_fitting`; masks recur
        self._came: dict[bytes, int] = {}  # a narrow mask -> the token taken there last

    def copy(self) -> Foresight:
        """A copy that advances independently; both share the cache of masks."""
        other = Foresight(self._spelling, self._copying.copy())
        other._came, other._begin_alike = self._came.copy(), self._begin_alike
        return other

    def note(self, mask: bytes, token: int) -> None:
        """Record that `token` was taken where `mask` was the mask."""
        if _is_narrow(mask) and (mask in self._came or len(self._came) < _REMEMBERED):
            self._came[mask] = token

    def wrote(self, tail: bytes, place: JsonPlace | None, token: int) -> None:
        """Record that `token` was written after `tail`, which ends at `place` in JSON."""
        if place is not None:
            self._copying.wrote(tail, place.inside, self._speller.tokens[token], token)

    def ahead(self, matcher: LLMatcher, tail: bytes, place: JsonPlace | None, most: int) -> tuple[int, ...]:
        """Tokens that are likely to come next.

        Args:
            matcher: the automaton; not modified.
            tail: the last bytes of the answer.
            place: the position in JSON at the end of `tail`, not modified; None for other languages.
            most: maximum number of tokens.
        """
        ids: list[int] = []
        matcher = matcher.deep_copy()  # takes microseconds; an error stays in the copy
        place = None if place is None else place.copy()
        while len(ids) < most:
            step = self._copied(matcher, tail, place) or self._next(matcher, tail[-1] if tail else -1)
            taken = matcher.try_consume_tokens(step[: most - len(ids)]) if step else 0
            ids += step[:taken]
            if not taken or taken < len(step):
                break
            text = b"".join([self._speller.tokens[id_] for id_ in step])
            tail = (tail + text)[-TAIL:]
            if place is not None:
                place.read(text)
        return tuple(ids)

    def _copied(self, matcher: LLMatcher, tail: bytes, place: JsonPlace | None) -> list[int]:
        """Tokens that continue or close the current value as in the prompt; [] if unknown or not allowed."""
        if place is None:
            return []
        value = value_in(tail, place.inside)
        text = self._copying.ahead(value) if value else None
        if text is None:
            return []
        if text:
            step = self._spelling.behind(value, text)
        else:
            closing = self._copying.closing(inside=place.inside)
            step = [] if closing is None else [closing]
        return step if step and matcher.validate_tokens(step) == len(step) else []

    def _next(self, matcher: LLMatcher, last: int) -> list[int]:
        """The likely next token, or several that spell forced text; [] where there is a real choice."""
        forced = matcher.compute_ff_bytes()
        if matcher.is_stopped():
            return []
        mask = matcher.compute_bitmask()
        if not _is_narrow(mask):
            return []
        came = self._came.get(mask[: (len(self._speller.tokens) + 7) // 8])
        if came is not None and (forced or came in self._fitting(mask)):
            return [came]
        return self._spelling.spell(forced) or self._narrow(mask, last)

    def _narrow(self, mask: bytes, last: int) -> list[int]:
        """The likely next token where all allowed tokens begin alike; [] elsewhere."""
        fitting = self._fitting(mask)
        if not fitting:
            return []
        spaced = last >= 0 and last in _SPACED
        tokens = self._speller.tokens
        return [max(fitting, key=lambda id_: (len(_bare(tokens[id_])), (tokens[id_][:1] == b" ") == spaced, -id_))]

    def _fitting(self, mask: bytes) -> list[int]:
        """The allowed tokens that fit the beginning shared by all, spaces aside; [] if none, or if eos is allowed."""
        known = self._begin_alike.get(mask)
        if known is None:
            known = self._that_begin_alike(mask)
            if len(self._begin_alike) < _REMEMBERED:
                self._begin_alike[mask] = known
        return known

    def _that_begin_alike(self, mask: bytes) -> list[int]:
        ids = [id_ for id_ in _ids(mask) if id_ < len(self._speller.tokens)]
        bare = {id_: _bare(self._speller.tokens[id_]) for id_ in ids}
        texts = [text for text in bare.values() if text]
        if not texts or any(id_ in self._speller.eos for id_ in ids):
            return []
        common = _begins(min(texts), max(texts))
        longest = max(texts, key=len)
        if all(longest.startswith(text) for text in texts):  # each is a prefix of the longest
            common = longest
        return [id_ for id_, text in bare.items() if text and common.startswith(text)]


def _begins(one: bytes, other: bytes) -> bytes:
    """The common prefix of two texts, of which `one` sorts first."""
    return one[: next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))]


def _bare(text: bytes) -> bytes:
    return text.replace(b" ", b"")


def _is_narrow(mask: bytes) -> bool:
    return int.from_bytes(mask, "little").bit_count() <= _FEW


def _ids(mask: bytes) -> list[int]:
    """The token ids in a mask."""
    ids, left = [], int.from_bytes(mask, "little")
    while left:
        lowest = left & -left
        ids.append(lowest.bit_length() - 1)
        left ^= lowest
    return ids
