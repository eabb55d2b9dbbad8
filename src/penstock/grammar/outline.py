"""The outline of a partial document: the parts of its text that can affect what may follow.

A search treats two texts with the same outline as equal. An outline keeps the names and the number of members, and
drops the contents of free strings, numbers and closed containers. It is a heuristic: the search compares masks as well.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = ["Freedom", "Outline", "class_text"]

_CLOSED = b"\x00"
_FREE = b"\x01"


class Freedom(enum.Enum):
    """How much a grammar allows at one point."""

    LITTLE = "a few tokens: what is chosen is a choice"
    SOME = "a class of characters"
    MUCH = "almost anything"


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of one text.

    Attributes:
        json: whether the text is JSON; any other text is kept, blurred according to the freedom at each token.
        open: the outlines of the top level and of the open containers, outermost first; the last is being written.
        string: the blurred contents of the open string; None outside a string.
        escaped: whether the open string ends in a backslash that begins an escape.
        free: whether any part of the open string was written with more than `Freedom.LITTLE`.
    """

    json: bool
    open: tuple[bytes, ...] = (b"",)
    string: bytes | None = None
    escaped: bool = False
    free: bool = False

    def after(self, text: bytes, freedom: Freedom) -> Outline:
        """The outline after `text`, written where the grammar allowed `freedom`."""
        if not self.json:
            return replace(self, open=(self.open[0] + _blurred(text, freedom),))
        if self.string is not None and not (self.escaped or b'"' in text or b"\\" in text):
            free = self.free or freedom is not Freedom.LITTLE
            return replace(self, string=self.string + _blurred(text, freedom), free=free)
        outline = self
        for at in range(len(text)):
            outline = outline._after(text[at : at + 1], freedom)
        return outline

    def _after(self, byte: bytes, freedom: Freedom) -> Outline:
        if self.string is not None:
            return self._in_string(self.string, byte, freedom)
        if byte == b'"':
            return replace(self, string=b"", free=False)
        if byte in b"{[":
            return replace(self, open=(*self.open, byte))
        if byte in b"}]" and len(self.open) > 1:
            *outer, around, _ = self.open
            return replace(self, open=(*outer, around + _CLOSED))
        if byte == b" ":
            return self
        *outer, last = self.open
        if byte == b",":
            last = last.rstrip(b"0123456789.eE+-truefalsn")
        return replace(self, open=(*outer, last + byte))

    def _in_string(self, string: bytes, byte: bytes, freedom: Freedom) -> Outline:
        free = self.free or freedom is not Freedom.LITTLE
        if byte == b'"' and not self.escaped:
            *outer, last = self.open
            return replace(self, open=(*outer, last + b'"' + (_FREE if self.free else string)), string=None, free=False)
        escaped = byte == b"\\" and not self.escaped
        return replace(self, string=string + _blurred(byte, freedom), escaped=escaped, free=free)


def _blurred(text: bytes, freedom: Freedom) -> bytes:
    match freedom:
        case Freedom.LITTLE:
            return text
        case Freedom.SOME:
            return class_text(text)
        case Freedom.MUCH:
            return _FREE * len(text)


_CLASSES = bytes.maketrans(
    b"123456789BCDEFGHIJKLMNOPQRSTUVWXYZbcdefghijklmnopqrstuvwxyz", b"0" * 9 + b"A" * 25 + b"a" * 25
)


def class_text(text: bytes) -> bytes:
    """`text` with every digit replaced by 0, every uppercase ASCII letter by A and every lowercase one by a."""
    return text.translate(_CLASSES)
