"""The answer of the compiling process about one grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.grammar.ending import Ending

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Taken or refused.

    Attributes:
        error: why it is refused, for the caller; "" if it is taken.
        code: the error's machine-readable word.
        ending_text: a whole document of the grammar, the shortest that was found, in Latin-1: a character a byte.
        ids: the tokens that spell it.
        size: bytes of memory that compiling took.
    """

    error: str = ""
    code: str = "invalid_value"
    ending_text: str = ""
    ids: tuple[int, ...] = ()
    size: int = 0

    @property
    def ending(self) -> Ending:
        """The document."""
        return Ending(self.ending_text.encode("latin-1"), self.ids)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Verdict:
        """From its fields, as JSON has them."""
        return cls(**{**given, "ids": tuple(given["ids"])})
