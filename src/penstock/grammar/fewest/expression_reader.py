"""Parser of regular expressions: Thompson's construction into an automaton that the caller owns.

Reads the syntax that JSON Schema and Rust's regex share, with ASCII classes. Everything else is `Unreadable`, never
guessed at.
"""

from __future__ import annotations

import re
from typing import Protocol

__all__ = ["LAST", "Ranges", "Reader", "Unreadable"]

_MOST_DEPTH = 60
LAST = 0x10FFFF
_CLASSES = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_PROPERTIES = {
    "L": ((0x41, 0x5A), (0x61, 0x7A)),
    "Lu": ((0x41, 0x5A),),
    "Ll": ((0x61, 0x7A),),
    "N": ((0x30, 0x39),),
    "Nd": ((0x30, 0x39),),
}
"""Only the ASCII members: what they match is right, and a document with others would hardly ever be shorter."""
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|s?:))?")
_PROPERTY = re.compile(r"p(?:\{(\w+)\}|(\w))")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")

Ranges = tuple[tuple[int, int], ...]


class Unreadable(Exception):
    """The grammar uses something that this package does not support. The grammar may still be valid."""


class Building(Protocol):
    """An automaton under construction."""

    def state(self) -> int:
        """A new state."""

    def move(self, at: int, ranges: Ranges) -> int:
        """A new state, reached from `at` by any character in `ranges`."""

    def skip(self, at: int, to: int) -> None:
        """Let `to` be reached from `at` without reading a character."""

    def anchor(self, at: int, to_start: bool) -> int:
        """A new state that is passed only at the beginning of the text, or only at its end."""


class Reader:
    """Parses an expression from left to right and builds it into an automaton."""

    def __init__(self, source: str, into: Building) -> None:
        self._source = source
        self._into = into
        self._at = self._depth = 0

    def whole(self, at: int) -> int:
        """Read the whole expression from state `at` on; returns the state after it."""
        end = self._alternatives(at)
        if self._at != len(self._source):
            raise Unreadable("a parenthesis too many")
        return end

    def _alternatives(self, at: int) -> int:
        ends = [self._sequence(at)]
        while self._taken("|"):
            ends.append(self._sequence(at))
        to = self._into.state()
        for end in ends:
            self._into.skip(end, to)
        return to

    def _sequence(self, at: int) -> int:
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            at = self._repeated(at)
        return at

    def _repeated(self, at: int) -> int:
        begin = self._at
        entry, end = self._copy(at, begin)
        behind = self._at
        least, most = self._counts()
        resume, entries, ends = self._at, [entry], [end]
        while len(ends) < (max(least, 1) if most is None else most):
            entry, end = self._copy(ends[-1], begin)
            assert self._at == behind, "an atom is read in the same way each time"
            entries.append(entry)
            ends.append(end)
        self._at = resume
        last = self._into.state()
        for passed in [entries[0], *ends][least : None if most is None else most + 1]:
            self._into.skip(passed, last)
        if most is None:
            self._into.skip(ends[-1], entries[-1])
        return last

    def _copy(self, at: int, begin: int) -> tuple[int, int]:
        """Read the atom at source index `begin` from state `at` on; returns the states before and after it."""
        self._at = begin
        entry = self._into.state()  # a loop must not lead back to before the atom
        self._into.skip(at, entry)
        return entry, self._atom(entry)

    def _counts(self) -> tuple[int, int | None]:
        """How often the preceding atom may come, at least and at most (None: no limit); (1, 1) without a quantifier."""
        mark = self._source[self._at : self._at + 1]
        if mark and mark in "*+?":
            self._at += 1
            counts: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        elif found := _COUNT.match(self._source, self._at):
            self._at = found.end()
            least, most = int(found[1]), int(found[3]) if found[3] else None
            counts = (least, most if found[2] else least)
        else:
            return 1, 1
        self._taken("?")  # lazy quantifiers match the same texts
        if self._source[self._at : self._at + 1] in ("*", "+", "?", "{"):
            raise Unreadable("a repetition of a repetition")
        return counts

    def _atom(self, at: int) -> int:
        if self._at >= len(self._source):
            raise Unreadable("nothing to repeat")
        if self._source[self._at] == "(":
            return self._group(at)
        character = self._next()
        match character:
            case "^" | "$":
                return self._into.anchor(at, to_start=character == "^")
            case "[":
                return self._into.move(at, self._class())
            case "\\":
                return self._into.move(at, self._escape())
            case ".":
                return self._into.move(at, _others(((10, 10),)))
            case "*" | "+" | "?" | "{":
                raise Unreadable("nothing to repeat")
        return self._into.move(at, ((ord(character), ord(character)),))

    def _group(self, at: int) -> int:
        found = _GROUP.match(self._source, self._at)
        assert found is not None, "a group begins with a parenthesis"
        self._at = found.end()
        if self._source[self._at : self._at + 1] == "?" or found[0] == "(?s:":
            raise Unreadable("a group that looks around, or sets flags")
        if self._depth >= _MOST_DEPTH:
            raise Unreadable("nested too deep")
        self._depth += 1
        end = self._alternatives(at)
        self._depth -= 1
        if not self._taken(")"):
            raise Unreadable("a parenthesis that is not closed")
        return end

    def _class(self) -> Ranges:
        negated, found = self._taken("^"), list[tuple[int, int]]()
        first = True
        while first or not self._taken("]"):
            if self._source[self._at : self._at + 2] in ("[:", "&&", "--", "~~"):
                raise Unreadable("operations on classes")
            first = False
            member = self._member()
            if len(member) == 1 and member[0][0] == member[0][1] and self._is_range():
                self._at += 1
                (last,) = self._member()
                if last[0] != last[1] or last[0] < member[0][0]:
                    raise Unreadable("a range of classes")
                member = ((member[0][0], last[0]),)
            found += member
        return _others(tuple(found)) if negated else tuple(found)

    def _is_range(self) -> bool:
        return self._source[self._at : self._at + 1] == "-" and self._source[self._at + 1 : self._at + 2] != "]"

    def _member(self) -> Ranges:
        character = self._next()
        if character == "[":
            raise Unreadable("a class in a class")
        return self._escape() if character == "\\" else ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        if found := _HEX.match(self._source, self._at):
            self._at = found.end()
            code = min(int(found[1] or found[2] or found[3], 16), LAST)
            return ((code, code),)
        if (found := _PROPERTY.match(self._source, self._at)) and (found[1] or found[2]) in _PROPERTIES:
            self._at = found.end()
            return _PROPERTIES[found[1] or found[2]]
        letter = self._next()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter.lower() in _CLASSES:
            return _others(_CLASSES[letter.lower()])
        if letter.isalnum() and letter not in _CONTROLS:
            raise Unreadable(f"\\{letter}")
        code = _CONTROLS.get(letter, ord(letter))
        return ((code, code),)

    def _next(self) -> str:
        if self._at >= len(self._source):
            raise Unreadable("it ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _taken(self, character: str) -> bool:
        if self._source[self._at : self._at + 1] != character:
            return False
        self._at += 1
        return True


def _others(ranges: Ranges) -> Ranges:
    """All characters outside `ranges`."""
    found, low = [], 0
    for first, last in sorted(ranges):
        if low < first:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return (*found, (low, LAST))
