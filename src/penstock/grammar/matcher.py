"""One answer on its way through its grammar, with its end always in reach.

Decides which tokens may come next. Invariant: an ending is known that is right after what was taken, and that fits the
tokens that are left, the end-of-sequence token included; a token after which none is known is not taken. A pure
function of the grammar, the room and the tokens taken, so that a rebuilt matcher stands where the old one stood.
"""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLMatcher

from penstock.contract.errors import EngineFault
from penstock.grammar.closing import Closer, JsonPlace
from penstock.grammar.vocabulary import Speller

__all__ = ["GuidedMatcher"]


class GuidedMatcher:
    """A `contract.ports.Matcher`. Owned by the runner; one thread at a time.

    Args:
        matcher: at the grammar's beginning; owned by this object from now on.
        place: where in JSON it stands; None for other languages.
        ending: a text that completes the document from here.
        room: tokens that may still be generated; the ending fits.
    """

    __slots__ = ("_closer", "_ending", "_matcher", "_place", "_room", "_speller", "_tokens")

    def __init__(
        self, matcher: LLMatcher, speller: Speller, closer: Closer, place: JsonPlace | None, ending: bytes, room: int
    ) -> None:
        self._matcher = matcher
        self._speller = speller
        self._closer = closer
        self._place = place
        self._room = room
        self._ending = ending
        self._tokens = speller.spell(ending)

    def mask(self) -> bytes:
        """The tokens that may come next, a bit an id, lowest bit first."""
        if self._room <= len(self._tokens) + 1:  # no token to spare: the known ending, token by token
            return _only(self._tokens[:1] or self._speller.eos, len(self._speller.tokens))
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise EngineFault("the grammar of this request became too complex to follow")
        return mask

    def take(self, token: int) -> bool:
        """Go on past `token`; false, and nothing has changed, if the document could not be completed after it."""
        if token in self._speller.eos:
            return self._room >= 1 and self._matcher.is_accepting() and bool(self._matcher.consume_token(token))
        if self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
            return False
        place = self._placed_after(token)
        for ending in self._endings(token, place):
            ids = self._speller.spell(ending)
            if len(ids) + 1 < self._room and self._completes(ids):
                self._ending, self._tokens, self._place = ending, ids, place
                self._room -= 1
                return True
        self._matcher.rollback(1)
        return False

    def closing(self) -> int:
        """The next token of the known ending; it can always be taken."""
        return self._tokens[0] if self._tokens else self._speller.eos[0]

    def _placed_after(self, token: int) -> JsonPlace | None:
        if self._place is None:
            return None
        place = self._place.copy()
        place.read(self._speller.tokens[token])
        return place

    def _endings(self, token: int, place: JsonPlace | None) -> Iterable[bytes]:
        """Endings to try after `token`, the cheapest to find first: most tokens do not change what is open."""
        yield self._ending[len(self._speller.tokens[token]) :]
        yield self._ending
        found = self._closer.ending(self._matcher, place)
        if found is not None:
            yield found

    def _completes(self, ids: list[int]) -> bool:
        if not ids:  # an automaton that can only stop takes no token any more, not even this one
            return bool(self._matcher.is_accepting())
        return self._matcher.validate_tokens([*ids, self._speller.eos[0]]) == len(ids) + 1


def _only(ids: Iterable[int], width: int) -> bytes:
    mask = bytearray((width + 31) // 32 * 4)
    for id_ in ids:
        mask[id_ >> 3] |= 1 << (id_ & 7)
    return bytes(mask)
