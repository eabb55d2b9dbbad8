"""An ending: a text that completes a document, and the tokens that spell it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.grammar.vocabulary import Speller

__all__ = ["Ending"]


@dataclass(frozen=True, slots=True)
class Ending:
    """A text after which a document is complete; "" where it is complete already.

    Attributes:
        text: its bytes.
        ids: tokens whose bytes are `text`.
    """

    text: bytes
    ids: tuple[int, ...]

    @classmethod
    def spelled(cls, text: bytes, speller: Speller) -> Ending:
        """`text`, by longest match."""
        return cls(text, tuple(speller.spell(text)))

    @classmethod
    def of(cls, ids: tuple[int, ...], speller: Speller) -> Ending:
        """The text that the tokens spell."""
        return cls(b"".join(speller.tokens[id_] for id_ in ids), ids)

    def after(self, count: int, speller: Speller) -> Ending:
        """What is left of it behind its first `count` bytes: all tokens but those that the cut goes through."""
        gone = first = 0
        while gone < count:
            gone += len(speller.tokens[self.ids[first]])
            first += 1
        rest = self.text[count:]
        return Ending(rest, (*speller.spell(self.text[count:gone]), *self.ids[first:]))
