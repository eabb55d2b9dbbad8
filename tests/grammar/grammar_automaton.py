"""Automata over bytes, built state by state: literals, characters in UTF-8, regular expressions, quoted JSON strings.

Independent of what it judges: nothing here knows llguidance or the rooms of the engine. Where a form is not built
exactly it is built wider, never narrower. Sources: RFC 8259 (JSON), RFC 3629 (UTF-8), and Python's own parser of
regular expressions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from re import _constants as sre
from re import _parser as sre_parser
from typing import Any

Ranges = tuple[tuple[int, int], ...]

ANY: Ranges = ((0, 0x10FFFF),)
_CATEGORIES: dict[Any, Ranges] = {
    sre.CATEGORY_DIGIT: ((0x30, 0x39),),
    sre.CATEGORY_WORD: ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    sre.CATEGORY_SPACE: ((9, 13), (0x20, 0x20)),
}
_NEGATED = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
}
_SHORT_ESCAPES = {8: b"b", 9: b"t", 10: b"n", 12: b"f", 13: b"r", 0x22: b'"', 0x5C: b"\\"}


class Automaton:
    """States are numbers, moves are ranges of symbols (bytes, or characters while an expression is read)."""

    def __init__(self) -> None:
        self.moves: list[list[tuple[int, int, int]]] = []
        self.skips: list[list[int]] = []

    def state(self) -> int:
        self.moves.append([])
        self.skips.append([])
        return len(self.moves) - 1

    def move(self, at: int, low: int, high: int, to: int) -> None:
        self.moves[at].append((low, high, to))

    def skip(self, at: int, to: int) -> None:
        self.skips[at].append(to)

    def text(self, at: int, text: bytes) -> int:
        """The state after exactly `text`."""
        for byte in text:
            to = self.state()
            self.move(at, byte, byte, to)
            at = to
        return at

    def closed(self, states: Iterable[int]) -> frozenset[int]:
        """All states that are reached from `states` without a symbol."""
        found = set(states)
        waiting = list(found)
        while waiting:
            for to in self.skips[waiting.pop()]:
                if to not in found:
                    found.add(to)
                    waiting.append(to)
        return frozenset(found)

    def after(self, states: Iterable[int], symbol: int) -> frozenset[int]:
        """All states that one symbol leads to."""
        hits = (to for state in states for low, high, to in self.moves[state] if low <= symbol <= high)
        return self.closed(hits)

    def accepts(self, start: int, end: int, text: bytes) -> bool:
        states = self.closed([start])
        for byte in text:
            states = self.after(states, byte)
        return end in states


class Pattern:
    """A regular expression over characters, searched for in a text unless it is anchored; deterministic on demand."""

    def __init__(self, expression: str) -> None:
        self._automaton = Automaton()
        tree = list(sre_parser.parse(expression, 0))
        start, self._end = self._automaton.state(), self._automaton.state()
        self._search(start, tree)
        self.start = self._automaton.closed([start])

    def cuts(self) -> set[int]:
        """Characters at which a range of characters with the same moves begins."""
        edges = [edge for edges in self._automaton.moves for edge in edges]
        return {low for low, _, _ in edges} | {high + 1 for _, high, _ in edges}

    def after(self, states: frozenset[int], character: int) -> frozenset[int]:
        return self._automaton.after(states, character)

    def accepts(self, states: frozenset[int]) -> bool:
        return self._end in states

    def _search(self, start: int, tree: list[Any]) -> None:
        if len(tree) == 1 and tree[0][0] is sre.BRANCH:
            for branch in tree[0][1][1]:
                self._search(start, list(branch))
            return
        first = bool(tree) and tree[0] == (sre.AT, sre.AT_BEGINNING)
        last = bool(tree) and tree[-1] == (sre.AT, sre.AT_END)
        at = start if first else self._anything(start)
        at = self._sequence(at, tree[first : len(tree) - last])
        self._automaton.skip(at if last else self._anything(at), self._end)

    def _anything(self, at: int) -> int:
        to = self._automaton.state()
        self._automaton.skip(at, to)
        self._automaton.move(to, 0, 0x10FFFF, to)
        return to

    def _sequence(self, at: int, tree: Iterable[Any]) -> int:
        for operation, argument in tree:
            at = self._piece(at, operation, argument)
        return at

    def _piece(self, at: int, operation: Any, argument: Any) -> int:
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(at, *argument)
        if operation is sre.SUBPATTERN:
            return self._sequence(at, argument[3])
        to = self._automaton.state()
        if operation is sre.BRANCH:
            for branch in argument[1]:
                self._automaton.skip(self._sequence(at, branch), to)
            return to
        for low, high in _characters(operation, argument):
            self._automaton.move(at, low, high, to)
        return to

    def _repeat(self, at: int, least: int, most: Any, tree: Any) -> int:
        for _ in range(least):
            at = self._sequence(at, tree)
        end = self._automaton.state()
        self._automaton.skip(at, end)
        if most is sre.MAXREPEAT:
            self._automaton.skip(self._sequence(end, tree), end)
            return end
        for _ in range(most - least):
            at = self._sequence(at, tree)
            self._automaton.skip(at, end)
        return end


def _characters(operation: Any, argument: Any) -> Ranges:
    match operation:
        case sre.LITERAL:
            return ((argument, argument),)
        case sre.NOT_LITERAL:
            return _others(((argument, argument),))
        case sre.ANY:
            return _others(((10, 10),))
        case sre.RANGE:
            return (argument,)
        case sre.CATEGORY:
            return _others(_CATEGORIES[_NEGATED[argument]]) if argument in _NEGATED else _CATEGORIES[argument]
        case sre.IN:
            negated = argument[0][0] is sre.NEGATE
            found = tuple(one for member in argument[negated:] for one in _characters(*member))
            return _others(found) if negated else found
    raise ValueError(f"{operation} is not read here")


def _others(ranges: Ranges) -> Ranges:
    found, low = [], 0
    for first, last in sorted(ranges):
        if low < first:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return (*found, (low, 0x10FFFF)) if low <= 0x10FFFF else tuple(found)


def quoted(
    automaton: Automaton, at: int, patterns: Sequence[Pattern] = (), least: int = 0, most: int | None = None
) -> int:
    """The state after a JSON string of `least` to `most` characters whose text matches all `patterns`."""
    cap = least if most is None else most + 1
    cuts = sorted({0, 0x20, 0x22, 0x23, 0x5C, 0x5D, 0x7F, 0x80, *range(8, 14)}.union(*(one.cuts() for one in patterns)))
    classes = [(low, high - 1) for low, high in zip(cuts, [*cuts[1:], 0x110000], strict=True) if low < 0x110000]
    first = tuple(one.start for one in patterns), 0
    states, waiting = {first: automaton.text(at, b'"')}, [first]
    end = automaton.state()
    while waiting:
        places, count = key = waiting.pop()
        here = states[key]
        if count >= least and all(one.accepts(place) for one, place in zip(patterns, places, strict=True)):
            automaton.move(here, 0x22, 0x22, end)
        for low, high in classes:
            following = tuple(one.after(place, low) for one, place in zip(patterns, places, strict=True))
            further = following, min(count + 1, cap)
            if not all(following) or (most is not None and count + 1 > most):
                continue
            if further not in states:
                states[further] = automaton.state()
                waiting.append(further)
            _written(automaton, here, low, high, states[further])
    return end


def unlike(automaton: Automaton, at: int, taken: Collection[str]) -> int:
    """The state after a JSON string that is not written as one of `taken`; in it, any character may be escaped."""
    prefixes = {name[:size] for name in taken for size in range(len(name) + 1)} | {""}
    states = {prefix: automaton.state() for prefix in sorted(prefixes)}
    free, end = automaton.state(), automaton.state()
    automaton.skip(automaton.text(at, b'"'), states[""])
    for prefix, here in (*states.items(), (None, free)):
        if prefix not in taken:
            automaton.move(here, 0x22, 0x22, end)
        nexts = {longer[-1]: state for longer, state in states.items() if longer and longer[:-1] == prefix}
        for character, state in nexts.items():
            _written(automaton, here, ord(character), ord(character), state)
        for low, high in _others(tuple((ord(one), ord(one)) for one in nexts)):
            _written(automaton, here, low, high, free)
        _any_hex(automaton, here, free)
    return end


def _any_hex(automaton: Automaton, at: int, to: int) -> None:
    at = automaton.text(at, b"\\u")
    for left in (3, 2, 1, 0):
        following = automaton.state() if left else to
        for low, high in (b"09", b"af", b"AF"):
            automaton.move(at, low, high, following)
        at = following


def _written(automaton: Automaton, at: int, low: int, high: int, to: int) -> None:
    """Moves for each character of a range, as JSON writes it within quotes."""
    plain: list[tuple[int, int]] = []
    for first, last in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF)):
        if max(low, first) <= min(high, last):
            plain.append((max(low, first), min(high, last)))
    for first, last in plain:
        for spans in _utf8(first, last):
            _spans(automaton, at, spans, to)
    for character, letter in _SHORT_ESCAPES.items():
        if low <= character <= high:
            automaton.skip(automaton.text(at, b"\\" + letter), to)
    for first, last in ((0, 0xF), (0x10, 0x1F), (0x7F, 0x7F)):
        if max(low, first) <= min(high, last):
            _hex(
                automaton, automaton.text(at, b"\\u00%x" % (first >> 4)), max(low, first) & 15, min(high, last) & 15, to
            )


def _hex(automaton: Automaton, at: int, low: int, high: int, to: int) -> None:
    """One hexadecimal digit of a range."""
    for digit in range(low, high + 1):
        for mark in {b"%x" % digit, b"%X" % digit}:
            automaton.move(at, mark[0], mark[0], to)


def _spans(automaton: Automaton, at: int, spans: Sequence[tuple[int, int]], to: int) -> None:
    for low, high in spans[:-1]:
        following = automaton.state()
        automaton.move(at, low, high, following)
        at = following
    automaton.move(at, *spans[-1], to)


def _utf8(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """The characters of a range as sequences of byte ranges (RFC 3629, section 3)."""
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from _utf8(low, limit)
            yield from _utf8(limit + 1, high)
            return
    size = len(chr(high).encode())
    for place in range(1, size):
        span = 1 << 6 * place
        if low // span != high // span:
            if low % span:
                yield from _utf8(low, (low | (span - 1)))
                yield from _utf8((low | (span - 1)) + 1, high)
                return
            if high % span != span - 1:
                yield from _utf8(low, high // span * span - 1)
                yield from _utf8(high // span * span, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
