"""Defines a row of the table, and what measuring a row returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

__all__ = ["Depth", "Measured", "Outcome", "Progress", "Row", "judge"]

_MOST_MISSES = 8
"""Most misses that a record keeps: enough to find the fault, and few enough to read the table."""


class Depth(StrEnum):
    """How many trials a row makes: `deep` as many as the target says, `quick` a tenth of them."""

    QUICK = "quick"
    DEEP = "deep"

    def of(self, deep: int, quick: int | None = None) -> int:
        """Return the number of trials: `deep`; in a quick run `quick`, by default a tenth of `deep`, at least one."""
        if self is Depth.DEEP:
            return deep
        return quick if quick is not None else max(1, deep // 10)


class Outcome(StrEnum):
    """The possible outcomes for a target."""

    REACHED = "reached"
    MISSED = "missed"
    NOT_MEASURED = "not measured"
    FAILED = "failed"
    """The row itself failed, so nothing is known."""


class Progress(Protocol):
    """Says how far a row has come."""

    def expect(self, total: int) -> None:
        """Set the number of trials to come."""
        ...

    def update(self, count: int = 1) -> None:
        """Add `count` trials that are done."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds what a row found.

    Attributes:
        figure: the figure for the table, in a few words.
        misses: a sentence for each thing that missed the target; empty if the target was reached.
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
    """One promise, and how it is tested.

    Attributes:
        id: the id in the table, for example `R7`.
        title: what is tested.
        target: what a deep run must reach.
        peers: what other servers state or test.
        run: tests the promise; None if nothing does yet.
        timed: whether the figure depends on how fast and how idle the machine is.
        instead: for a row that nothing tests: why, or what tests it elsewhere.
    """

    id: str
    title: str
    target: str
    peers: str
    run: Callable[[Depth, Progress], Measured] | None = None
    timed: bool = False
    instead: str = ""


def judge(figure: str, misses: Iterable[str], **values: Any) -> Measured:
    """Return a measurement that keeps only the first few misses; its values say how many there were."""
    found = list(misses)
    return Measured(figure, tuple(found[:_MOST_MISSES]), values | {"misses": len(found)})
