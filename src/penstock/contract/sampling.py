"""The value that carries sampling choices through rooms that do not look inside it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NEUTRAL", "SamplingSpec", "SamplingValue"]

SamplingValue = bool | int | float


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Validated sampling parameters of one sequence, non-neutral entries only, sorted by name.

    A parameter that has its neutral value is absent: a row that uses no stage pays for none, and two requests that mean
    the same compare equal. Built by `penstock.sampling`, read by `exec`; every other room passes it on unread.
    """

    entries: tuple[tuple[str, SamplingValue], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.entries]
        if names != sorted(set(names)):
            raise ValueError(f"entries must be sorted by name and unique, got {names}")

    def get(self, name: str, neutral: SamplingValue) -> SamplingValue:
        """The stored value of `name`, or `neutral` when the request left it neutral."""
        for key, value in self.entries:
            if key == name:
                return value
        return neutral

    def has(self, name: str) -> bool:
        """Whether `name` was given a value that is not neutral."""
        return any(key == name for key, _ in self.entries)


NEUTRAL = SamplingSpec()
