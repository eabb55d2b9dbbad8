"""What a value of a JSON answer is likely to go on with: what stands behind the same words in its prompt.

Names, places and numbers are mostly copied from the text that an answer is about, in the order of that text. Its bytes
are compared, because its tokens differ: behind a quotation mark a name is spelled in others than behind a space. A
guess, never a mask.
"""

from __future__ import annotations

import re

__all__ = ["Copying", "value_in"]

_LONGEST = 24
"""Bytes of a value, its last ones, that are looked for."""
_PLACES = 8
"""Places that are looked at, from the last one that was copied from on, and again from the beginning."""
_WORD = re.compile(rb"[0-9A-Za-z\x80-\xff'_-]+")
_NUMBER = re.compile(rb"[0-9][0-9.]*$")


def value_in(tail: bytes, inside: bool) -> bytes:
    """The value at the end of a JSON text, as far as it is written: of a string, or of a number; b"" for none.

    Args:
        tail: the last bytes of the text.
        inside: whether they end in a string.
    """
    if inside:
        return tail.rpartition(b'"')[2][-_LONGEST:]
    number = _NUMBER.search(tail)
    return number[0] if number else b""


class Copying:
    """Where in a prompt an answer is. Owned by its matcher.

    Args:
        source: the prompt's bytes.
        at: the place that was copied from last, behind it.
        closing: for strings and for numbers (`inside`), the token that ended the last one.
    """

    __slots__ = ("_at", "_closing", "_source")

    def __init__(self, source: bytes, at: int = 0, closing: dict[bool, int] | None = None) -> None:
        self._source = source
        self._at = at
        self._closing = closing or {}

    def copy(self) -> Copying:
        """The same knowledge, to go on from separately."""
        return Copying(self._source, self._at, self._closing.copy())

    def wrote(self, tail: bytes, inside: bool, text: bytes, token: int) -> None:
        """`token`, of these bytes, was written behind `tail`."""
        value = value_in(tail, inside)
        ended = b'"' in text if inside else not text[:1].isdigit()
        if value and ended:
            self._closing[inside] = token
            self._at = max(self._at, self._behind(value))

    def ahead(self, value: bytes) -> bytes | None:
        """What follows `value` in the prompt, a word at most: b"" where it ends there, None where it is not found."""
        end = self._behind(value)
        if end < 0:
            return None
        rest = _WORD.match(self._source, end)
        if rest is not None:  # of a word
            return rest[0]
        word = _WORD.match(self._source, end + 1) if self._source[end : end + 1] == b" " else None
        if word is None or value.isdigit() or (value[:1].isupper() and not word[0][:1].isupper()):
            return b""
        return b" " + word[0]

    def closing(self, *, inside: bool) -> int | None:
        """The token that ended the last string, or the last number; None where none has ended."""
        return self._closing.get(inside)

    def _behind(self, value: bytes) -> int:
        """The index behind a place of `value` that begins a word, the next one first; below 0 for none."""
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
