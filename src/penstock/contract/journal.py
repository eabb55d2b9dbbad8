"""What a server writes down so that it outlives the process: streams that were begun, and answers to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["AnswerJournal", "BegunStream", "Journal", "KeptAnswer"]


@dataclass(frozen=True, slots=True)
class BegunStream:
    """A stream that was begun. An answer depends on its request alone, so it holds nothing of the answer.

    Attributes:
        id: the answer's id; it determines the seed if the request names none.
        tenant: who asked for it; "" if the server has no keys.
        digest: SHA-256 of the request's body.
        created: Unix time.
        same_model: whether everything that the answer depends on besides its request is as it was.
    """

    id: str
    tenant: str
    digest: bytes
    created: int
    same_model: bool = True


class Journal(Protocol):
    """Remembers streams beyond the end of the server. Neither method ever raises: without a journal streams go on."""

    async def add(self, begun: BegunStream) -> None:
        """Write the stream down; returns when the entry would survive the end of this process."""
        ...

    async def find(self, answer_id: str) -> BegunStream | None:
        """The stream with that id; None if it is no longer there."""
        ...


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that its caller asked to store, or the latest state of one that is being made.

    Attributes:
        kind: the kind of answer, by which ids and content are read: each kind has one store.
        id: the answer's id.
        tenant: who asked for it; "" if the server has no keys.
        content: the texts and everything else, as its store writes them.
        same_model: for a loaded answer: whether everything that answers depend on besides their requests is as it was.
    """

    kind: str
    id: str
    tenant: str
    content: bytes
    same_model: bool = True


class AnswerJournal(Protocol):
    """Keeps stored answers beyond the end of the server. Only `load` raises: otherwise memory is enough to go on."""

    def load(self, kind: str) -> Sequence[KeptAnswer]:
        """Load all answers of a kind; the one that was written last comes last.

        Raises:
            ConfigError: they cannot be read.
        """
        ...

    async def holds(self, answer_id: str) -> bool:
        """Whether an answer with this id, of any kind, is written down; also False if that cannot be read."""
        ...

    def put(self, answer: KeptAnswer) -> None:
        """Have it written soon, in place of its former state."""
        ...

    def drop(self, kind: str, answer_id: str) -> None:
        """Have it removed soon, because there is no room for it."""
        ...

    def delete(self, kind: str, answer_id: str) -> None:
        """As `drop`, but because its owner wants it gone: nothing of it stays in the journal's files."""
        ...

    async def settled(self) -> None:
        """Return when everything asked for so far would survive the end of this process, or cannot be done."""
        ...
