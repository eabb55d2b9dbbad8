"""In which tokens a model is likely to spell text that its form forces.

As its tokenizer does, since it has read text in no other tokens; by longest match where the tokenizer has put something
in front of the text, or there is none. A guess, whichever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.grammar.vocabulary import Speller

__all__ = ["Encode", "ForcedSpelling"]

Encode = Callable[[str], Sequence[int]]

_MOST_BYTES = 128
"""Of a text; longer ones are cut."""
_KEPT = 256
"""Texts of one answer whose tokens are kept: the tokenizer takes some 50 microseconds."""


class ForcedSpelling:
    """Spells what is forced, without its last token: that often goes on behind the text.

    Args:
        speller: the vocabulary.
        encode: the tokenizer's; None for longest match.
    """

    __slots__ = ("_encode", "_known", "speller")

    def __init__(self, speller: Speller, encode: Encode | None = None) -> None:
        self.speller = speller
        self._encode = encode
        self._known: dict[bytes, list[int]] = {}

    def spell(self, text: bytes) -> list[int]:
        """Tokens whose bytes are the beginning of `text`; [] where it is no more than one."""
        text = text[:_MOST_BYTES]
        known = self._known.get(text)
        if known is None:
            known = self._spelled(text)[:-1]
            if len(self._known) < _KEPT:
                self._known[text] = known
        return known

    def behind(self, written: bytes, text: bytes) -> list[int]:
        """Tokens whose bytes are `text`, as the tokenizer spells it behind what is `written`."""
        both = written + b"\0" + text
        known = self._known.get(both)
        if known is None:
            known = self._spelled_behind(written, text)
            if len(self._known) < _KEPT:
                self._known[both] = known
        return known

    def _spelled_behind(self, written: bytes, text: bytes) -> list[int]:
        ids, bytes_left = self._spelled(written + text), len(written)
        while ids and bytes_left > 0:
            bytes_left -= len(self.speller.tokens[ids.pop(0)])
        return ids if not bytes_left and ids else self._spelled(text) or self.speller.spell(text)

    def _spelled(self, text: bytes) -> list[int]:
        speller = self.speller
        if len(text) < 2 or not speller.byte_ids.keys() >= set(text):
            return []
        if self._encode is not None and text.isascii():
            ids = list(self._encode(text.decode()))
            if b"".join([speller.tokens[id_] for id_ in ids]) == text:
                return ids
        return speller.spell(text)
