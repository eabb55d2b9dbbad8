"""Regular expressions as nondeterministic automata over characters, determinised as they are used.

Knows neither JSON nor bytes nor tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.grammar.fewest.expression_reader import LAST, Ranges, Reader, Unreadable

__all__ = ["Expression", "Places", "Unreadable"]

_MOST_STATES = 4096

Places = frozenset[int]


class Expression:
    """An automaton as pure functions: `start`, then `after` each character, then `accepts`. Immutable but for a memo.

    Args:
        source: the expression.
        anywhere: whether it may match a part of the text, as in JSON Schema; else it must match all of it.

    Raises:
        Unreadable: it uses unsupported syntax, or is too large.
    """

    def __init__(self, source: str, anywhere: bool) -> None:
        self._moves: list[list[tuple[int, int, int]]] = []
        self._skips: list[list[int]] = []
        self._at_start: set[int] = set()  # states passed only at the beginning of the text
        self._at_end: set[int] = set()
        self._memory: dict[tuple[Places, int], Places] = {}
        first = self.state()
        inner = self._any(first) if anywhere else first
        last = Reader(source, self).whole(inner)
        self._final = self._any(last) if anywhere else last
        self._useful = self._leading_to_the_end()
        self.start = self._closed([first], self._at_start)

    def after(self, places: Places, character: int) -> Places:
        """The possible places after one more character; empty if nothing can match any more."""
        known = self._memory.get((places, character))
        if known is None:
            hits = (to for place in places for low, high, to in self._moves[place] if low <= character <= high)
            known = self._memory[places, character] = self._closed(hits, frozenset())
        return known

    def accepts(self, places: Places) -> bool:
        """Whether the text may end here."""
        return self._final in places or self._final in self._closed(places, self._at_end)

    @property
    def cuts(self) -> frozenset[int]:
        """Code points that may behave unlike the one before; from one cut up to the next, all behave alike."""
        moves = [move for moves in self._moves for move in moves]
        return frozenset(low for low, _, _ in moves) | {high + 1 for _, high, _ in moves}

    def matches(self, text: str) -> bool:
        """Whether the expression matches `text`."""
        places = self.start
        for character in text:
            places = self.after(places, ord(character))
        return self.accepts(places)

    def state(self) -> int:
        """A new state."""
        if len(self._moves) >= _MOST_STATES:
            raise Unreadable("too large")
        self._moves.append([])
        self._skips.append([])
        return len(self._moves) - 1

    def move(self, at: int, ranges: Ranges) -> int:
        """A new state, reached from `at` by any character in `ranges`."""
        to = self.state()
        self._moves[at] += [(low, high, to) for low, high in ranges]
        return to

    def skip(self, at: int, to: int) -> None:
        """Let `to` be reached from `at` without reading a character."""
        self._skips[at].append(to)

    def anchor(self, at: int, to_start: bool) -> int:
        """A new state that is passed only at the beginning of the text, or only at its end."""
        to = self.state()
        self.skip(at, to)
        (self._at_start if to_start else self._at_end).add(to)
        return to

    def _any(self, at: int) -> int:
        to = self.state()
        self.skip(at, to)
        self._moves[to].append((0, LAST, to))
        return to

    def _closed(self, states: Iterable[int], passed: Iterable[int]) -> Places:
        """The useful states reached without reading a character, through no anchors but those in `passed`."""
        found: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in found:
                continue
            found.add(state)
            anchored = state in self._at_start or state in self._at_end
            if not anchored or state in passed:
                waiting += self._skips[state]
        return frozenset(found & self._useful)

    def _leading_to_the_end(self) -> set[int]:
        """The states from which a text that has begun can still match; it can no longer pass a start anchor."""
        before: list[list[int]] = [[] for _ in self._moves]
        for state, moves in enumerate(self._moves):
            passed = () if state in self._at_start else self._skips[state]
            for to in (*passed, *(to for _, _, to in moves)):
                before[to].append(state)
        found, waiting = set[int](), [self._final]
        while waiting:
            state = waiting.pop()
            if state not in found:
                found.add(state)
                waiting += before[state]
        return found
