"""The hash over one choice's log probabilities, and a mark of that hash after every token.

The hash makes sure that a difference is found; the marks say where the first one is. A mark is too short to reveal a
log probability. Once in 65,536 times a different log probability has the same mark: then the next token is named.
"""

from __future__ import annotations

import hashlib
import struct

__all__ = ["MARK_CHARS", "Trail"]

MARK_CHARS = 4
"""Length of a mark in hex digits."""

_BEGINNING = b"penstock certificate: token id, float32 log probability, rank; little-endian"
_TOKEN = struct.Struct("<IfI")


class Trail:
    """Takes the tokens of one choice in order. Owned by the caller that certifies the choice."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(_BEGINNING)
        self._marks: list[str] = []

    def add(self, token: int, logprob: float, rank: int) -> None:
        """Add the next token.

        Args:
            token: its id, from 0.
            logprob: its log probability, a float32.
            rank: its place among all tokens by likelihood, from 1.
        """
        self._hash.update(_TOKEN.pack(token, logprob, rank))
        self._marks.append(self._hash.hexdigest()[:MARK_CHARS])

    @property
    def marks(self) -> str:
        """`MARK_CHARS` hex digits for each token: the beginning of the hash over the tokens up to it."""
        return "".join(self._marks)

    @property
    def digest(self) -> str:
        """The hash over all tokens: 64 hex digits."""
        return self._hash.hexdigest()
