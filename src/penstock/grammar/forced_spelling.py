"""Guesses which tokens a model uses for text that its grammar forces.

Uses the tokenizer's tokens, because the model has read text in no others. Uses the longest match if there is no
tokenizer, if its tokens are not exactly the text (it may add a prefix), or if the text is not ASCII. Both are guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.grammar.vocabulary import Speller

__all__ = ["Encode", "ForcedSpelling"]

Encode = Callable[[str], Sequence[int]]

_MOST_BYTES = 128
"""Longer forced texts are cut to this."""
_KEPT = 256
"""Texts per answer whose tokens are cached: the tokenizer takes some 50 microseconds for each."""


class ForcedSpelling:
    """Spells forced text in tokens, and caches them.

    Args:
        speller: the vocabulary.
        encode: the tokenizer's encode function; None for longest match.
    """

    __slots__ = ("_encode", "_known", "speller")

    def __init__(self, speller: Speller, encode: Encode | None = None) -> None:
        self.speller = speller
        self._encode = encode
        self._known: dict[bytes, list[int]] = {}

    def spell(self, text: bytes) -> list[int]:
        """The tokens of `text` without the last, which often extends past the text; [] if there is at most one."""
        text = text[:_MOST_BYTES]
        known = self._known.get(text)
        if known is None:
            known = self._spelled(text)[:-1]
            if len(self._known) < _KEPT:
                self._known[text] = known
        return known

    def behind(self, written: bytes, text: bytes) -> list[int]:
        """The tokens of `text` as the tokenizer spells it after `written`, or on its own if a token spans both."""
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
