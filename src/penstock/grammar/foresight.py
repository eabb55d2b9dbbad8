"""What comes next where a grammar leaves hardly a choice: names of properties, punctuation, what is constant.

Guesses, never masks: a form leaves it to the model how to spell what it forces, so even forced text may come in other
tokens, and a JSON text may have a space in front or not. Where this answer stood at such a place before, what came
there is guessed. Else forced text is spelled (`forced_spelling`) but for its last token; there, and where only a space
is free, the longest token that fits is guessed. A value that has begun is guessed to go on as the same words do in the
prompt (`copying`).
"""

from __future__ import annotations

from llguidance import LLMatcher

from penstock.grammar.closing import JsonPlace
from penstock.grammar.copying import Copying, value_in
from penstock.grammar.forced_spelling import ForcedSpelling

__all__ = ["TAIL", "Foresight"]

TAIL = 64
"""Bytes of an answer, its last ones, that guesses look at."""
_FEW = 128
"""Tokens that may come, of which more are no narrow place."""
_SPACED = b",:"
"""What models write a space behind."""
_REMEMBERED = 128
"""Narrow places of one answer: some 6 KB each, twice, with a large vocabulary."""


class Foresight:
    """Guesses along one answer. Owned by its matcher.

    Args:
        spelling: how text is spelled.
        copying: of the prompt.
    """

    __slots__ = ("_begin_alike", "_came", "_copying", "_speller", "_spelling")

    def __init__(self, spelling: ForcedSpelling, copying: Copying) -> None:
        self._spelling = spelling
        self._copying = copying
        self._speller = spelling.speller
        self._begin_alike: dict[bytes, list[int]] = {}  # a mask -> those of its tokens; the same places come again
        self._came: dict[bytes, int] = {}  # the mask of a narrow place -> the token that came there last

    def copy(self) -> Foresight:
        """The same knowledge, to go on from separately."""
        other = Foresight(self._spelling, self._copying.copy())
        other._came, other._begin_alike = self._came.copy(), self._begin_alike
        return other

    def note(self, mask: bytes, token: int) -> None:
        """`token` came where `mask` was what may come."""
        if _is_narrow(mask) and (mask in self._came or len(self._came) < _REMEMBERED):
            self._came[mask] = token

    def wrote(self, tail: bytes, place: JsonPlace | None, token: int) -> None:
        """`token` was written behind `tail`, at this place in JSON."""
        if place is not None:
            self._copying.wrote(tail, place.inside, self._speller.tokens[token], token)

    def ahead(self, matcher: LLMatcher, tail: bytes, place: JsonPlace | None, most: int) -> tuple[int, ...]:
        """Tokens that are likely to come next.

        Args:
            matcher: left as it is.
            tail: the last bytes that were written.
            place: where in JSON they end, left as it is; None for other languages.
            most: tokens.
        """
        ids: list[int] = []
        matcher = matcher.deep_copy()  # an error on the way stays with the copy; takes some microseconds
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
        """How the value that has begun goes on in the prompt, or ends; [] where nothing is known, or it may not."""
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
        """The token that is likely to come, or several that spell what must; [] where there is a choice."""
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
        """The token that is likely to come where all that may come begin alike; [] at any other place."""
        fitting = self._fitting(mask)
        if not fitting:
            return []
        spaced = last >= 0 and last in _SPACED
        tokens = self._speller.tokens
        return [max(fitting, key=lambda id_: (len(_bare(tokens[id_])), (tokens[id_][:1] == b" ") == spaced, -id_))]

    def _fitting(self, mask: bytes) -> list[int]:
        """Of the tokens that may come, those that begin what all begin, but for spaces; [] where nothing does."""
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
        if all(longest.startswith(text) for text in texts):  # nothing speaks against it
            common = longest
        return [id_ for id_, text in bare.items() if text and common.startswith(text)]


def _begins(one: bytes, other: bytes) -> bytes:
    """What both begin with."""
    return one[: next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))]


def _bare(text: bytes) -> bytes:
    return text.replace(b" ", b"")


def _is_narrow(mask: bytes) -> bool:
    return int.from_bytes(mask, "little").bit_count() <= _FEW


def _ids(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    ids, left = [], int.from_bytes(mask, "little")
    while left:
        lowest = left & -left
        ids.append(lowest.bit_length() - 1)
        left ^= lowest
    return ids
