"""A short text that a regular expression probably matches, read off its syntax.

Takes the shortest alternative, the fewest repetitions and one common character of each class. An example may be wrong:
callers try it on the automaton first. Expressions in other dialects get none.
"""

from __future__ import annotations

import re
import string

__all__ = ["example_of"]

_MOST_CHARS = 4096
_MOST_DEPTH = 60
_COMMON = ("a", "0", "A", " ", "-", ".", "_", *string.printable, *map(chr, range(0x80, 0x250)))
_REPEATS = re.compile(r"(?:[*?+]|\{(\d*)(?:,\d*)?\})[?+]?")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|x\{[0-9a-fA-F]+\}|u\{[0-9a-fA-F]+\}|[pP]\{[^}]*\}|.)", re.S)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.S)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[a-z-]*:))?")


class _Unreadable(Exception):
    """The expression is in an unsupported dialect, or its shortest text is very long."""


def example_of(expression: str) -> str | None:
    """A text that most probably matches `expression` as a whole; None if none can be read off it."""
    reader = _Reader(expression)
    try:
        text = reader.alternatives(0)
    except _Unreadable:
        return None
    return text if reader.at_end else None


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._at = 0

    @property
    def at_end(self) -> bool:
        """Whether the whole expression was read."""
        return self._at == len(self._expression)

    def alternatives(self, depth: int) -> str:
        """The shortest text of the alternatives up to a closing parenthesis or the end."""
        if depth > _MOST_DEPTH:
            raise _Unreadable
        texts = [self._sequence(depth)]
        while self._taken("|"):
            texts.append(self._sequence(depth))
        return min(texts, key=len)

    def _sequence(self, depth: int) -> str:
        text = ""
        while not self.at_end and self._expression[self._at] not in "|)":
            text += self._repeated(self._atom(depth))
            if len(text) > _MOST_CHARS:
                raise _Unreadable
        return text

    def _repeated(self, atom: str) -> str:
        while found := _REPEATS.match(self._expression, self._at):
            self._at = found.end()
            least = 1 if found[0][0] == "+" else int(found[1] or 0)
            if len(atom) * least > _MOST_CHARS:
                raise _Unreadable
            atom *= least
        return atom

    def _atom(self, depth: int) -> str:
        if self._taken("^") or self._taken("$"):
            return ""
        if self._expression[self._at] == "(":
            return self._group(depth)
        for form in (_CLASS, _ESCAPE):
            if found := form.match(self._expression, self._at):
                self._at = found.end()
                return _member(found[0])
        self._at += 1
        character = self._expression[self._at - 1]
        return "a" if character == "." else character

    def _group(self, depth: int) -> str:
        found = _GROUP.match(self._expression, self._at)
        assert found is not None, "a group begins with a parenthesis"
        self._at = found.end()
        if self._expression[self._at : self._at + 1] == "?":  # lookaround or flags: not supported
            raise _Unreadable
        text = self.alternatives(depth + 1)
        if not self._taken(")"):
            raise _Unreadable
        return text

    def _taken(self, character: str) -> bool:
        if self.at_end or self._expression[self._at] != character:
            return False
        self._at += 1
        return True


def _member(form: str) -> str:
    """One character of a class or an escape; "" for an anchor."""
    if form[:2] in (r"\b", r"\A", r"\z", r"\Z", r"\B"):
        return ""
    if form[0] == "[":
        form = _plain_class(form)
    if form[:3] in (r"\x{", r"\u{"):
        return chr(min(int(form[3:-1], 16), 0x10FFFF))
    try:
        pattern = re.compile(form)
    except re.error as error:
        raise _Unreadable from error
    found: str | None = next((one for one in (*_COMMON, *form) if pattern.fullmatch(one)), None)
    if found is None:
        raise _Unreadable
    return found


def _plain_class(form: str) -> str:
    """A class in Python's syntax: brackets in it are escaped, and set operations are refused."""
    body = form[1:-1]
    if any(mark in body for mark in ("[:", "&&", "--", "~~", "||")):
        raise _Unreadable
    pieces: list[str] = re.findall(r"\\.|.", body, re.S)
    quoted = [r"\[" if piece == "[" else piece for piece in pieces]
    return "".join(("[", *quoted, "]"))
