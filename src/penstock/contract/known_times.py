"""What is known of step times before a process has measured any: calculated, or kept from an earlier process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from penstock.contract.errors import ConfigError

__all__ = ["KnownParts", "KnownTimes"]

_AGEING = 0.2
"""By how much a part may have changed since an earlier process, as a share of it."""

_OTHER_PACE = 0.3
"""By how much the machine may be busier or less busy than it was."""

_BELIEVED = 8
"""How many steps the knowledge of an earlier process counts as: enough that no single step overrules it."""


@dataclass(frozen=True, slots=True)
class KnownParts:
    """Seconds for one unit of each amount (for example, for one row that decodes).

    Attributes:
        seconds: seconds of each part.
        doubts: the standard deviation of each part, in seconds.
        pace: the standard deviation of a factor that all parts have in common, besides their own: a machine may be
            busier now than it was.
        learned: how many steps they were learned from; 0 if they are calculated.

    Raises:
        ConfigError: a number is negative or not finite, or the numbers of doubts and of parts differ.
    """

    seconds: tuple[float, ...]
    doubts: tuple[float, ...]
    pace: float = 0.0
    learned: int = 0

    def __post_init__(self) -> None:
        if len(self.doubts) != len(self.seconds):
            raise ConfigError("step_times", f"{len(self.seconds)} parts, but {len(self.doubts)} doubts")
        for each in (*self.seconds, *self.doubts, self.pace, self.learned):
            if not (each >= 0 and isfinite(each)):
                raise ConfigError("step_times", f"must be finite and at least 0, got {each}")

    def later(self) -> KnownParts:
        """A copy for another process: with more doubt, so that what that process measures soon corrects it."""
        doubts = tuple(doubt + _AGEING * seconds for doubt, seconds in zip(self.doubts, self.seconds, strict=True))
        return replace(self, doubts=doubts, pace=_OTHER_PACE, learned=min(self.learned, _BELIEVED))


@dataclass(frozen=True, slots=True)
class KnownTimes:
    """The parts of step times (`core.step_time`) that are known before the first step.

    Attributes:
        steps: the parts of a step.
        chunks: whether any step with a part of a prompt was measured.
        guessing: a draft model's parts; None if nothing is known of it.
        drafts: the price of having drafts and the price of each position, by the number of rows in powers of two.
        reading: the part for a position that is read from the store of KV blocks; None if none was read.
    """

    steps: KnownParts
    chunks: bool = False
    guessing: KnownParts | None = None
    drafts: tuple[tuple[int, KnownParts], ...] = ()
    reading: KnownParts | None = None

    def later(self) -> KnownTimes:
        """A copy for another process; see `KnownParts.later`."""
        return KnownTimes(
            self.steps.later(),
            self.chunks,
            None if self.guessing is None else self.guessing.later(),
            tuple((rows, parts.later()) for rows, parts in self.drafts),
            None if self.reading is None else self.reading.later(),
        )
