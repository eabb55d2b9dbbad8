"""What a server writes down to survive its own end: the streams that were begun, and the answers to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["AnswerJournal", "BegunStream", "Journal", "KeptAnswer"]


@dataclass(frozen=True, slots=True)
class BegunStream:
    """A stream that was begun. An answer depends on its request alone, so nothing of the answer is in it.

    Attributes:
        id: the answer's; the seed of a request that names none follows from it.
        tenant: who asked for it; "" where the server has no keys.
        digest: of the request's body, SHA-256.
        created: Unix time.
        same_model: whether all that the answer depends on beside its request is as it was.
    """

    id: str
    tenant: str
    digest: bytes
    created: int
    same_model: bool = True


class Journal(Protocol):
    """Remembers streams beyond the end of the server. Neither method ever raises: without a journal streams go on."""

    async def add(self, begun: BegunStream) -> None:
        """Write it down; returns when it would survive the end of this process."""
        ...

    async def find(self, answer_id: str) -> BegunStream | None:
        """The stream of that id; None if it is not there any more."""
        ...


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that its caller asked to store, or the latest state of one that is being made.

    Attributes:
        kind: whose ids and content these are: each kind has one store.
        id: the answer's.
        tenant: who asked for it; "" where the server has no keys.
        content: the texts and all else, as its store writes them.
        same_model: of one that was loaded: whether all that answers depend on beside their requests is as it was.
    """

    kind: str
    id: str
    tenant: str
    content: bytes
    same_model: bool = True


class AnswerJournal(Protocol):
    """Keeps stored answers beyond the end of the server. But for `load` nothing raises: memory is enough to go on."""

    def load(self, kind: str) -> Sequence[KeptAnswer]:
        """All of a kind, the one that was written last at the end.

        Raises:
            ConfigError: they cannot be read.
        """
        ...

    async def holds(self, answer_id: str) -> bool:
        """Whether an answer of this id, of any kind, is written down; False too if that cannot be read."""
        ...

    def put(self, answer: KeptAnswer) -> None:
        """Have it written, in place of its former state, soon."""
        ...

    def drop(self, kind: str, answer_id: str) -> None:
        """Have it removed, soon: there is no room for it."""
        ...

    def delete(self, kind: str, answer_id: str) -> None:
        """As `drop`, because its owner wants it gone: nothing of it stays in the journal's files."""
        ...

    async def settled(self) -> None:
        """Return when all that was asked so far would survive the end of this process, or cannot be done."""
        ...
