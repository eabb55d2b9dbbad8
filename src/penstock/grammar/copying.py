"""Guesses that a value in a JSON answer continues as the same words do in its prompt.

Names, places and numbers are mostly copied from the text that an answer is about, in the order of that text. Bytes are
compared, because tokens differ: a name has other tokens after a quotation mark than after a space. The result is a
guess, never a mask.
"""

from __future__ import annotations

import re

__all__ = ["Copying", "value_in"]

_LONGEST = 24
"""How many of a value's last bytes are searched for."""
_PLACES = 8
"""How many occurrences are checked from the last copied place on; as many again are checked from the beginning."""
_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff'_-]+")
_NUMBER = re.compile(rb"[0-9][0-9.]*$")


def value_in(tail: bytes, inside: bool) -> bytes:
    """The unfinished string or number at the end of a JSON text, as far as it is written; b"" for none.

    Args:
        tail: the last bytes of the text.
        inside: whether they end inside a string.
    """
    if inside:
        return tail.rpartition(b'"')[2][-_LONGEST:]
    number = _NUMBER.search(tail)
    return number[0] if number else b""


class Copying:
    """Tracks where in a prompt an answer copies from. Owned by its matcher.

    Args:
        source: the prompt's bytes.
        at: the offset in `source` after the last copied value.
        closing: for strings (True) and for numbers (False), the token that ended the last one.
    """

    __slots__ = ("_at", "_closing", "_source")

    def __init__(self, source: bytes, at: int = 0, closing: dict[bool, int] | None = None) -> None:
        self._source = source
        self._at = at
        self._closing = closing or {}

    def copy(self) -> Copying:
        """An independent copy."""
        return Copying(self._source, self._at, self._closing.copy())

    def wrote(self, tail: bytes, inside: bool, text: bytes, token: int) -> None:
        """Record that `token`, whose bytes are `text`, was written after `tail`."""
        value = value_in(tail, inside)
        ended = b'"' in text if inside else not text[:1].isdigit()
        if value and ended:
            self._closing[inside] = token
            self._at = max(self._at, self._behind(value))

    def ahead(self, value: bytes) -> bytes | None:
        """At most one word that follows `value` in the prompt; b"" if the value ends there, None if it is not found."""
        end = self._behind(value)
        if end < 0:
            return None
        rest = _WORD.match(self._source, end)
        if rest is not None:  # `value` ends within a word
            return rest[0]
        word = _WORD.match(self._source, end + 1) if self._source[end : end + 1] == b" " else None
        if word is None or value.isdigit() or (value[:1].isupper() and not word[0][:1].isupper()):
            return b""
        return b" " + word[0]

    def closing(self, *, inside: bool) -> int | None:
        """The token that ended the last string (`inside`) or number; None if none has ended yet."""
        return self._closing.get(inside)

    def _behind(self, value: bytes) -> int:
        """The offset after an occurrence of `value` at the start of a word, preferably after `_at`; -1 for none."""
        source = self._source
        for start in (self._at, 0) if self._at else (0,):
            place = start - 1
            for _ in range(_PLACES):
                place = source.find(value, place + 1)
                if place < 0:
                    break
                if len(value) == _LONGEST or not _WORD.match(source, place - 1, place) or not _WORD.match(value):
                    return place + len(value)
        return -1
