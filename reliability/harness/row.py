"""What a row of the table is, and what measuring it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

__all__ = ["Depth", "Measured", "Outcome", "Progress", "Row", "judge"]

_MOST_MISSES = 8
"""Misses that a record keeps: enough to find the fault, and a table can still be read."""


class Depth(StrEnum):
    """How much is tried: `deep` is what the target says, `quick` a tenth of it."""

    QUICK = "quick"
    DEEP = "deep"

    def of(self, deep: int, quick: int | None = None) -> int:
        """So many trials: `deep` of them, or a tenth, at least one, unless `quick` says how many."""
        if self is Depth.DEEP:
            return deep
        return quick if quick is not None else max(1, deep // 10)


class Outcome(StrEnum):
    """What can be said of a target."""

    REACHED = "reached"
    MISSED = "missed"
    NOT_MEASURED = "not measured"
    FAILED = "failed"
    """The row itself broke off, so nothing is known."""


class Progress(Protocol):
    """Says how far a row has come."""

    def expect(self, total: int) -> None:
        """So many trials are to come."""
        ...

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """What a row found.

    Attributes:
        figure: for the table, in a few words.
        misses: what did not reach the target, a sentence each; empty where it was reached.
        values: the numbers behind the figure.
    """

    figure: str
    misses: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """Whether the target was reached."""
        return Outcome.MISSED if self.misses else Outcome.REACHED


@dataclass(frozen=True, slots=True)
class Row:
    """One promise, and how it is tried.

    Attributes:
        id: as in the table, such as `R7`.
        title: what is tried.
        target: what is to be reached, in deep.
        peers: what other servers state or test.
        run: tries it; None where nothing does yet.
        timed: whether its figure depends on how quick and how idle the machine is.
        instead: of a row that nothing tries: why, or what holds it elsewhere.
    """

    id: str
    title: str
    target: str
    peers: str
    run: Callable[[Depth, Progress], Measured] | None = None
    timed: bool = False
    instead: str = ""


def judge(figure: str, misses: Iterable[str], **values: Any) -> Measured:
    """A measurement whose misses are kept to the first few; how many there were is among its values."""
    found = list(misses)
    return Measured(figure, tuple(found[:_MOST_MISSES]), values | {"misses": len(found)})
