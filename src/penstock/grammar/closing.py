"""Endings: from any state of llguidance's automaton, a short text that completes the document.

`ending` walks its path on a copy of the automaton, so what it finds is right by construction; how short it is depends
on the search. `endings` proposes more, which the caller checks. In JSON, `ending` closes what is open and writes the
smallest value where one is missing; in other languages, it searches breadth first over a few characters of each class.
All searches are bounded and deterministic.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator

from llguidance import LLMatcher

from penstock.grammar.ending import Ending
from penstock.grammar.vocabulary import Speller
from penstock.thread_turns import give_way

__all__ = ["Closer", "JsonPlace"]

_STRUCTURE = b'"{}[],:'
_AFTER_VALUE = b"}],:"
_NUMBER = b"0123456789-.eE+"
_VALUES = b'"ntf[{'
_FILLERS = b"a0A-:.@/ _TZ"
_MENDS = b"a0"
"""One of them completes most texts that lack one character, such as an e-mail address that ends in a dot."""
_MARKS = b'"@.-:/ _,(){}[]'
_CONTINUATIONS = b"\x80\xbf"  # one of them continues any unfinished character (RFC 3629, section 4)
_MAX_PATH = 16384
"""The search for an ending in JSON gives up beyond this many bytes."""
_MAX_FILL = 1024
"""The most characters that are put into one string to make it long enough."""
_FEW = 8
"""Up to this many filler characters are tried one by one, for patterns that repeat a group; for more, only a minimum
length is assumed."""
_LETTERS_SPELLED_OUT = 25
"""Up to this many allowed letters are all tried; more are a class, such as a-z, of which two are tried."""
_NEAR = 24
"""Bytes at either end of a known ending that are each tried as its new beginning."""
_MOST_STEPS = 8
"""After this many steps, often of a few bytes, the value begun last is closed, or much more than that is open."""
_MOST_RESTS = 48
"""Bytes of a hint that are each tried as its beginning, because some of the hint may be written already."""
_GLIMPSE = 6
"""The first bytes of an ending, which are tried before the whole ending is."""


class JsonPlace:
    """Whether a JSON text ends inside a string, which decides what its next characters mean."""

    __slots__ = ("escaped", "inside")

    def __init__(self) -> None:
        self.inside = False
        self.escaped = False

    def copy(self) -> JsonPlace:
        """An independent copy."""
        other = JsonPlace()
        other.inside, other.escaped = self.inside, self.escaped
        return other

    def read(self, text: bytes) -> None:
        """Advance past `text`."""
        for byte in text:
            if self.escaped:
                self.escaped = False
            elif self.inside and byte == 0x5C:
                self.escaped = True
            elif byte == 0x22:
                self.inside = not self.inside


class Closer:
    """Finds endings over one vocabulary. Stateless.

    Args:
        searches: states that a breadth-first search may expand.
        hints: pieces of which a short document may be made, shortest first.
    """

    def __init__(self, speller: Speller, searches: int, hints: tuple[bytes, ...] = ()) -> None:
        self._speller = speller
        self._hints = [hint for hint in hints if set(hint) <= speller.byte_ids.keys()]
        rests = {hint[at:] for hint in self._hints for at in range(min(len(hint), _MOST_RESTS))}
        self._rests = sorted(rests, key=lambda rest: (len(rest), rest))
        self._searches = searches
        self._most_marks = 48 if searches > 500 else 12  # admission searches wide, a running request narrow

    def ending(self, matcher: LLMatcher, place: JsonPlace | None) -> bytes | None:
        """A text that completes the document, b"" if it is complete; None if none was found.

        Args:
            matcher: the automaton; not modified.
            place: its position in JSON, not modified; None for other languages.
        """
        if place is None:
            return self._breadth(matcher, _is_complete)
        return self._json(matcher.deep_copy(), place.copy())

    def endings(
        self, matcher: LLMatcher, place: JsonPlace | None, known: Ending, text: bytes, like: bytes = b""
    ) -> Iterator[Ending]:
        """Yield endings to try, the cheapest to find first: most text changes little about an ending.

        `known` was an ending before `text` was written; `like` is another document of the grammar, whose end may close
        what is open. Does not modify `matcher`.
        """
        yield from self.kept(place, known, text)
        if place is not None:
            yield from self._joined(matcher.deep_copy(), place.copy(), known)
        for model, start in ((known.text, len(text)), (like, 0)):
            for near in self._near(matcher, place, model, start):
                yield Ending.spelled(near, self._speller)
        found = self.ending(matcher, place)
        if found is not None:
            yield Ending.spelled(found, self._speller)

    def kept(self, place: JsonPlace | None, known: Ending, text: bytes) -> Iterator[Ending]:
        """The part of `endings` that needs no search."""
        written = len(text)
        goes_on = place is not None and place.inside and known.text.startswith(b'"')  # in a string
        if goes_on:
            yield known
        if written <= len(known.text):  # `text` stands for as many bytes of `known`
            yield known.after(written, self._speller)
        if not goes_on:  # `text` opened nothing
            yield known
        bare = written - text.count(b" ")
        if place is not None and 0 < bare < written and bare <= len(known.text):  # `text` has spaces that `known` lacks
            yield known.after(bare, self._speller)

    def _joined(self, matcher: LLMatcher, place: JsonPlace, known: Ending) -> Iterator[Ending]:
        """Endings that write a few bytes and then continue as `known` does from a place near its beginning.

        Most often, the known ending only fails to close a name or number begun just now. Trying each byte of a long
        ending as that place would take thousands of times as long. Advances `matcher` and `place`.
        """
        path = b""
        for _ in range(_MOST_STEPS):
            step = self._json_step(matcher, place)
            if not step or not matcher.consume_tokens(self._speller.bytewise(step)):
                return
            place.read(step)
            path += step
            come: dict[int, bool] = {}
            for start, byte in enumerate(known.text[:_NEAR]):
                if byte not in come:
                    come[byte] = self._may_come(matcher, byte)
                if come[byte] and self._begins(matcher, known.text[start:]):
                    give_way()
                    rest = known.after(start, self._speller)
                    yield Ending(path + rest.text, (*self._speller.spell(path), *rest.ids))

    def _near(self, matcher: LLMatcher, place: JsonPlace | None, model: bytes, written: int) -> Iterator[bytes]:
        """Texts that complete the document and end as `model` does.

        Most text that changes an ending has skipped some of it, ends in half a character, has opened a string or
        requires one more character.
        """
        pad, end = self._pad(matcher, place), len(model)
        pads = [pad, pad + b'"'] if place is not None and place.inside else [pad]
        structural = (at for at, byte in enumerate(model) if byte in _STRUCTURE)
        starts = dict.fromkeys((written, 0, *range(_NEAR), *structural, *range(end - _NEAR, end + 1)))
        first: dict[bytes, bool] = {}
        heads = [(lead, start) for lead in pads for start in starts]
        heads += [(bytes([mend]), start) for mend in _MENDS for start in (written, 0)]
        for text in (lead + model[start:] for lead, start in heads if 0 <= start <= end):
            if text[:1] not in first:
                first[text[:1]] = not text or self._may_come(matcher, text[0])
            if not first[text[:1]]:
                continue
            give_way()
            if self._completes(matcher, text):
                yield text

    def _completes(self, matcher: LLMatcher, text: bytes) -> bool:
        return self._begins(matcher, text) and self._speller.completes(matcher, self._speller.bytewise(text))

    def _begins(self, matcher: LLMatcher, text: bytes) -> bool:
        """Whether the first bytes of `text` are allowed next."""
        glimpse = self._speller.bytewise(text[:_GLIMPSE])
        return bool(matcher.validate_tokens(glimpse) == len(glimpse))

    def _pad(self, matcher: LLMatcher, place: JsonPlace | None) -> bytes:
        """The bytes that complete an unfinished UTF-8 character or JSON escape."""
        if place is not None and place.escaped:
            return b"n"
        state, pad = matcher, b""
        while byte := next((byte for byte in _CONTINUATIONS if self._may_come(state, byte)), 0):
            state = state.deep_copy()
            state.consume_token(self._speller.byte_ids[byte])
            pad += bytes([byte])
        return pad

    def _may_come(self, matcher: LLMatcher, byte: int) -> bool:
        id_ = self._speller.byte_ids.get(byte)
        return id_ is not None and matcher.validate_tokens([id_]) == 1

    def _json(self, matcher: LLMatcher, place: JsonPlace) -> bytes | None:
        path = bytearray()
        while not matcher.is_accepting():
            give_way()
            step = self._json_step(matcher, place)
            if not step or len(path) > _MAX_PATH or not matcher.consume_tokens(self._speller.bytewise(step)):
                return None
            place.read(step)
            path += step
        return bytes(path)

    def _json_step(self, matcher: LLMatcher, place: JsonPlace) -> bytes | None:
        forced = self._forced(matcher)
        if forced:
            return forced
        if not place.inside:
            return self._first(matcher, _AFTER_VALUE) or self._number(matcher) or self._first(matcher, _VALUES)
        if place.escaped:
            return self._first(matcher, b'n"\\')
        return self._first(matcher, b'"') or self._fill(matcher) or self._close_string(matcher, place)

    def _number(self, matcher: LLMatcher) -> bytes | None:
        """The rest of a number; None where no number may start or continue."""
        if self._first(matcher, _NUMBER) is None:
            return None
        return self._breadth(matcher, self._ends_value)

    def _ends_value(self, matcher: LLMatcher, _path: bytes) -> bool:
        return matcher.is_accepting() or self._first(matcher, _AFTER_VALUE) is not None

    def _close_string(self, matcher: LLMatcher, place: JsonPlace) -> bytes | None:
        """The rest of a string that must match a pattern or format; forced bytes may lead past its end."""

        def closes(state: LLMatcher, path: bytes) -> bool:
            after = place.copy()
            after.read(path)
            return not after.inside or (not after.escaped and self._may_close(state))

        return self._breadth(matcher, closes)

    def _fill(self, matcher: LLMatcher) -> bytes | None:
        """Filler for a string that is too short: one character repeated until the closing quote is allowed."""
        filler = self._first(matcher, _FILLERS)
        if filler is None:
            return None
        id_, quote = self._speller.byte_ids[filler[0]], self._speller.byte_ids[0x22]
        most = matcher.validate_tokens([id_] * _MAX_FILL)

        def closes(count: int) -> bool:
            return matcher.validate_tokens([*[id_] * count, quote]) == count + 1

        small = next((count for count in range(1, min(most, _FEW) + 1) if closes(count)), None)
        if small is not None:
            return filler * small
        count = bisect_left(range(most + 1), True, lo=min(_FEW, most), key=closes)  # once long enough, it stays so
        return filler * count if count <= most and closes(count) else None

    def _may_close(self, matcher: LLMatcher) -> bool:
        return matcher.validate_tokens([self._speller.byte_ids[0x22]]) == 1

    def _forced(self, matcher: LLMatcher) -> bytes:
        forced = matcher.compute_ff_bytes()
        return forced if all(byte in self._speller.byte_ids for byte in forced) else b""

    def _first(self, matcher: LLMatcher, candidates: bytes) -> bytes | None:
        byte_ids = self._speller.byte_ids
        return next((bytes([byte]) for byte in candidates if matcher.validate_tokens([byte_ids[byte]]) == 1), None)

    def _breadth(self, matcher: LLMatcher, goal: Callable[[LLMatcher, bytes], bool]) -> bytes | None:
        """A short text that leads to `goal`: the end of a hint, or else what a search finds.

        Of states at the same distance that allow the same tokens next, only one is followed.
        """
        for rest in self._rests:
            after = self._after(matcher, rest)
            if after is not None and goal(after, rest):
                return rest
        heap: list[tuple[int, int, LLMatcher, bytes]] = [(0, 0, matcher.deep_copy(), b"")]
        seen: set[tuple[int, bytes]] = set()
        for opened in range(self._searches):
            if not heap:
                return None
            give_way()
            _, _, state, path = heapq.heappop(heap)
            if goal(state, path):
                return path
            for number, step in enumerate(self._steps(state)):
                after = self._after(state, step)
                if after is None:
                    continue
                longer = path + step
                looks = (len(longer), after.compute_bitmask())
                if looks not in seen:
                    seen.add(looks)
                    heapq.heappush(heap, (len(longer), opened * 512 + number, after, longer))
        return None

    def _after(self, matcher: LLMatcher, text: bytes) -> LLMatcher | None:
        """A copy of the automaton after `text`; None if `text` is not allowed."""
        ids = self._speller.bytewise(text)
        if matcher.validate_tokens(ids) < len(ids):
            return None
        after = matcher.deep_copy()
        return after if after.consume_tokens(ids) else None

    def _steps(self, matcher: LLMatcher) -> list[bytes]:
        """The steps to try next: forced bytes, or a few bytes of each class and every hint."""
        forced = self._forced(matcher)
        if forced:
            return [forced]
        allowed = _allowed(matcher, self._speller.byte_ids)
        letters = [byte for byte in allowed if bytes([byte]).isalpha()]
        digits = [byte for byte in allowed if bytes([byte]).isdigit()]
        others = sorted((b for b in allowed if b not in letters and b not in digits), key=_commonness)
        kept = letters if len(letters) <= _LETTERS_SPELLED_OUT else [letters[0], letters[-1]]
        marks = others[: self._most_marks]
        return [*(bytes([byte]) for byte in (*kept, *digits[:1], *digits[9:], *marks)), *self._hints]


def _commonness(byte: int) -> tuple[int, int]:
    """A sort key that puts the marks common in patterns and formats before all others."""
    place = _MARKS.find(byte)
    return (place if place >= 0 else len(_MARKS), byte)


def _is_complete(matcher: LLMatcher, _path: bytes) -> bool:
    return bool(matcher.is_accepting())


def _allowed(matcher: LLMatcher, byte_ids: dict[int, int]) -> list[int]:
    mask = matcher.compute_bitmask()
    return [byte for byte, id_ in sorted(byte_ids.items()) if mask[id_ >> 3] >> (id_ & 7) & 1]
