"""Tracks one answer's state in its grammar, with an ending always in reach.

Invariant: a known ending completes the document and fits in the tokens left, the end-of-sequence token included. A
token after which no ending is found is refused. The state is a pure function of the grammar, the token limit and the
tokens taken, so that a preempted sequence can rebuild it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llguidance import LLMatcher

from penstock.contract.errors import EngineFault
from penstock.grammar.closing import Closer, JsonPlace
from penstock.grammar.ending import Ending
from penstock.grammar.foresight import TAIL, Foresight
from penstock.grammar.vocabulary import Speller

__all__ = ["GuidedMatcher"]

_MOST_CHECKED = 256
"""Longest known ending, in tokens, that `take_at_once` tries to reuse whole; checking one takes 0.05 to 0.5 ms."""


class GuidedMatcher:
    """A `contract.ports.Matcher`. Owned by the runner; one thread at a time.

    Args:
        matcher: the automaton at the current position; owned by this object from now on.
        place: its position in JSON; None for other languages.
        ending: completes the document from that position.
        max_new_tokens: how many tokens may still be generated; `ending` fits in them.
        foresight: guesses what comes next; owned by this object from now on.
    """

    __slots__ = (
        "_closer",
        "_document",
        "_ending",
        "_foresight",
        "_left",
        "_mask",
        "_matcher",
        "_place",
        "_speller",
        "_tail",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        speller: Speller,
        closer: Closer,
        place: JsonPlace | None,
        ending: Ending,
        max_new_tokens: int,
        foresight: Foresight,
    ) -> None:
        self._matcher = matcher
        self._speller = speller
        self._closer = closer
        self._place = place
        self._left = max_new_tokens
        self._ending = ending
        self._foresight = foresight
        self._mask = b""  # for the next token; b"" if not asked for
        self._tail = b""  # the last bytes that were written
        self._document = ending.text  # its end may close what the answer opens

    def mask(self) -> bytes:
        """The tokens that may come next, one bit per id, lowest bit first."""
        ids, width = self._ending.ids, (len(self._speller.tokens) + 7) // 8
        if self._left <= len(ids) + 1:  # no token to spare: the known ending, token by token
            return _only(ids[:1] or self._speller.eos, width)
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise EngineFault("the grammar of this request became too complex to follow")
        self._mask = mask[:width]
        return self._mask

    def take(self, token: int) -> bool:
        """Advance past `token`; return False and change nothing if the document could not be completed after it."""
        return bool(self._take(token, self._ending_after))

    def take_at_once(self, token: int) -> bool | None:
        """Like `take`, but return None and change nothing if that needs a search for an ending."""
        return self._take(token, self._kept_after)

    def copy(self) -> GuidedMatcher:
        """See `contract.ports.Matcher`."""
        other = GuidedMatcher(
            self._matcher.deep_copy(),
            self._speller,
            self._closer,
            self._place,
            self._ending,
            self._left,
            self._foresight.copy(),
        )
        other._document, other._tail = self._document, self._tail
        return other

    def closing(self) -> int:
        """The next token of the known ending; it is always allowed."""
        return self._ending.ids[0] if self._ending.ids else self._speller.eos[0]

    def foresee(self, most: int) -> tuple[int, ...]:
        """See `contract.ports.Matcher`."""
        if self._left <= len(self._ending.ids) + 1:
            return self._ending.ids[:most]
        return self._foresight.ahead(self._matcher, self._tail, self._place, min(most, self._left - 1))

    def _take(self, token: int, ending_after: Callable[[bytes, JsonPlace | None], Ending | None]) -> bool | None:
        """Advance past `token`; return None and change nothing if no ending was found, False if it is not allowed."""
        if token in self._speller.eos:
            return self._left >= 1 and self._matcher.is_accepting() and bool(self._matcher.consume_token(token))
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        text = self._speller.tokens[token]
        place = self._placed_after(text)
        ending = ending_after(text, place)
        if ending is None:
            self._matcher.rollback(1)
            return None
        if self._mask:
            self._foresight.note(self._mask, token)
        self._foresight.wrote(self._tail, self._place, token)
        self._ending, self._place, self._mask = ending, place, b""
        self._tail = (self._tail + text)[-TAIL:]
        self._left -= 1
        return True

    def _placed_after(self, text: bytes) -> JsonPlace | None:
        if self._place is None:
            return None
        place = self._place.copy()
        place.read(text)
        return place

    def _ending_after(self, text: bytes, place: JsonPlace | None) -> Ending | None:
        """An ending of the document after `text` that fits in the tokens left then; None if none was found."""
        known = self._ending
        endings = self._closer.endings(self._matcher, place, known, text, self._document)
        return self._on_the_way(text) or next(filter(self._fits, endings), None)

    def _kept_after(self, text: bytes, place: JsonPlace | None) -> Ending | None:
        """An ending after `text`, found without a search: the rest of the known one or, if short, one made from it."""
        rest, known = self._on_the_way(text), self._ending
        if rest is not None or len(known.ids) > _MOST_CHECKED:
            return rest
        return next(filter(self._fits, self._closer.kept(place, known, text)), None)

    def _on_the_way(self, text: bytes) -> Ending | None:
        """The rest of the known ending if it begins with `text` and the rest fits: nothing else needs a check."""
        if not self._ending.text.startswith(text):
            return None
        rest = self._ending.after(len(text), self._speller)
        return rest if len(rest.ids) + 1 < self._left else None

    def _fits(self, ending: Ending) -> bool:
        """Whether `ending` completes the document and fits in the tokens left."""
        return len(ending.ids) + 1 < self._left and self._speller.completes(self._matcher, ending.ids)


def _only(ids: Iterable[int], width: int) -> bytes:
    mask = bytearray(width)
    for id_ in ids:
        mask[id_ >> 3] |= 1 << (id_ & 7)
    return bytes(mask)
