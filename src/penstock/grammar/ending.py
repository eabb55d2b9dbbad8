"""An ending: a text that completes a document, and the tokens that spell it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.grammar.vocabulary import Speller

__all__ = ["Ending"]


@dataclass(frozen=True, slots=True)
class Ending:
    """A text that completes a document; empty if the document is complete already.

    Attributes:
        text: the text, as bytes.
        ids: tokens whose bytes together are `text`.
    """

    text: bytes
    ids: tuple[int, ...]

    @classmethod
    def spelled(cls, text: bytes, speller: Speller) -> Ending:
        """The ending `text`, in the tokens that `speller` chooses."""
        return cls(text, tuple(speller.spell(text)))

    @classmethod
    def of(cls, ids: tuple[int, ...], speller: Speller) -> Ending:
        """The ending that the tokens `ids` spell."""
        return cls(b"".join(speller.tokens[id_] for id_ in ids), ids)

    def after(self, count: int, speller: Speller) -> Ending:
        """The ending without its first `count` bytes. Only a token that the cut splits is spelled anew."""
        gone = first = 0
        while gone < count:
            gone += len(speller.tokens[self.ids[first]])
            first += 1
        rest = self.text[count:]
        return Ending(rest, (*speller.spell(self.text[count:gone]), *self.ids[first:]))
