"""A beam search on llguidance's automaton for a document with few tokens, for use where `fewest` fails.

Each level is one token. One allowed token of each class is tried; states with the same outline and mask count once; the
beam keeps the states with the shortest known documents. The search starts from a known document, so it has an answer at
any time. It may miss the shortest document. Deterministic: the limit counts states, not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from penstock.grammar.closing import Closer, JsonPlace
from penstock.grammar.ending import Ending
from penstock.grammar.outline import Freedom, Outline, class_text
from penstock.grammar.vocabulary import Speller

__all__ = ["ShortestSearch"]

_FEW_TOKENS = 64
"""If at most this many tokens are allowed, all are tried; else one of each class."""
_BEAM = 40
"""States of a level that are expanded."""
_MOST_STATES = 1000
_PLAIN = frozenset(b'aA0 {}[]":,.-_+@/\\')


@dataclass(frozen=True, slots=True)
class _State:
    """A prefix of a document.

    Attributes:
        matcher: the automaton after the prefix; not modified any more.
        ids: the prefix's tokens.
        outline: the outline of its text.
        place: the position in JSON at its end; None for other languages.
        ending: completes the prefix if `ends`; else an ending of an earlier state.
        mask: the tokens allowed next.
        ends: whether an ending of this prefix is known.
    """

    matcher: LLMatcher
    ids: tuple[int, ...]
    outline: Outline
    place: JsonPlace | None
    ending: Ending
    mask: bytes
    ends: bool = True

    @property
    def length(self) -> int:
        """Tokens of the prefix with its ending; more than any document has if no ending is known."""
        return len(self.ids) + len(self.ending.ids) if self.ends else 1 << 30


class ShortestSearch:
    """The search over one vocabulary, all of whose tokens are read to construct it. Stateless.

    Raises nothing: if it finds nothing shorter, it returns the known document.
    """

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._classes = _classes(speller.tokens)
        self._usable = _usable(speller.tokens)
        self._width = len(speller.tokens)

    def shortest(self, matcher: LLMatcher, closer: Closer, is_json: bool, known: Ending) -> Ending:
        """The document found with the fewest tokens; `known` if none is shorter.

        The `matcher` is in its initial state and not modified; the `closer` proposes endings for each state.
        """
        best, made = known, 0
        place = JsonPlace() if is_json else None
        level = [_State(matcher, (), Outline(is_json), place, known, matcher.compute_bitmask())]
        seen: set[tuple[Outline, bytes]] = set()
        while level and len(level[0].ids) + 1 < len(best.ids) and made < _MOST_STATES:
            found = [state for one in level for state in self._next(one, closer, seen)]
            made += len(found)
            for state in found:
                if state.length < len(best.ids):
                    best = self._document(state.ids, state.ending)
            level = sorted(found, key=lambda state: (state.length, state.ids))[:_BEAM]
        return best

    def _next(self, state: _State, closer: Closer, seen: set[tuple[Outline, bytes]]) -> list[_State]:
        """The states one token further that were not seen yet."""
        allowed = int.from_bytes(state.mask, "little") & self._usable
        count = allowed.bit_count()
        freedom = Freedom.LITTLE if count <= _FEW_TOKENS else Freedom.MUCH if count * 2 > self._width else Freedom.SOME
        ids = _members(allowed) if freedom is Freedom.LITTLE else self._one_of_each_class(allowed)
        outlines = {state.outline.after(self._speller.tokens[id_], freedom): id_ for id_ in reversed(ids)}
        states = []
        for outline, id_ in sorted(outlines.items(), key=lambda pair: pair[1]):
            after = state.matcher.deep_copy()
            if not after.consume_token(id_):
                continue
            mask = after.compute_bitmask()
            if (outline, mask) in seen:
                continue
            seen.add((outline, mask))
            states.append(self._state(state, after, id_, outline, mask, closer))
        return states

    def _state(
        self, before: _State, matcher: LLMatcher, id_: int, outline: Outline, mask: bytes, closer: Closer
    ) -> _State:
        text = self._speller.tokens[id_]
        place = None if before.place is None else before.place.copy()
        if place is not None:
            place.read(text)
        endings = closer.endings(matcher, place, before.ending, text)
        ending = next((one for one in endings if self._speller.completes(matcher, one.ids)), None)
        return _State(matcher, (*before.ids, id_), outline, place, ending or before.ending, mask, ending is not None)

    def _one_of_each_class(self, allowed: int) -> list[int]:
        found = (allowed & members for members in self._classes)
        return sorted((hit & -hit).bit_length() - 1 for hit in found if hit)

    def _document(self, ids: tuple[int, ...], ending: Ending) -> Ending:
        return Ending(b"".join(self._speller.tokens[id_] for id_ in ids) + ending.text, (*ids, *ending.ids))


def _classes(tokens: Sequence[bytes]) -> list[int]:
    """Token ids by the character classes of their text, one bit set per class; only tokens of common characters."""
    members: dict[bytes, bytearray] = {}
    for id_, text in enumerate(tokens):
        blurred = class_text(text)
        if text and _PLAIN.issuperset(blurred):
            members.setdefault(blurred, bytearray(len(tokens) // 8 + 1))[id_ >> 3] |= 1 << (id_ & 7)
    return [int.from_bytes(bits, "little") for bits in members.values()]


def _usable(tokens: Sequence[bytes]) -> int:
    bits = bytearray(len(tokens) // 8 + 1)
    for id_, text in enumerate(tokens):
        bits[id_ >> 3] |= (1 if text else 0) << (id_ & 7)
    return int.from_bytes(bits, "little")


def _members(bits: int) -> list[int]:
    ids = []
    while bits:
        lowest = bits & -bits
        ids.append(lowest.bit_length() - 1)
        bits ^= lowest
    return ids
