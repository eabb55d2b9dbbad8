"""The compiling process's verdict on one grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.grammar.ending import Ending

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a grammar is accepted or refused.

    Attributes:
        error: why the grammar is refused, for the caller; "" if it is accepted.
        code: the machine-readable error code.
        ending_text: a whole document of the grammar, the shortest one found, in Latin-1: one character per byte.
        ids: the tokens that spell it.
        size: estimated memory of the compiled grammar, in bytes.
    """

    error: str = ""
    code: str = "invalid_value"
    ending_text: str = ""
    ids: tuple[int, ...] = ()
    size: int = 0

    @property
    def ending(self) -> Ending:
        """The document, as an ending."""
        return Ending(self.ending_text.encode("latin-1"), self.ids)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Verdict:
        """A verdict from its fields as parsed from JSON."""
        return cls(**{**given, "ids": tuple(given["ids"])})
