"""What is remembered of a stream that was begun, so that its rest can be generated, and where that may be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["BegunStream", "Journal"]


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
