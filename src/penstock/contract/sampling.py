"""The value that carries sampling choices through rooms that do not look inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

__all__ = ["NEUTRAL", "SamplingScalar", "SamplingSpec", "SamplingValue"]

SamplingScalar = bool | int | float | str
SamplingValue = SamplingScalar | tuple[SamplingScalar | tuple[SamplingScalar, ...], ...]
"""A number, a word, a list of them (token ids, texts), or a list of such lists (token id and bias, words in ids)."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Validated sampling parameters of one sequence, only those that are not neutral, sorted by name.

    A parameter that has its neutral value is absent: a row that uses no stage pays for none, and two requests that mean
    the same compare equal. Built by `penstock.sampling`, read by `exec`; every other room passes it on unread.
    """

    entries: tuple[tuple[str, SamplingValue], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.entries]
        if names != sorted(set(names)):
            raise ValueError(f"entries must be sorted by name and unique, got {names}")

    def get(self, name: str, neutral: _Value) -> _Value:
        """The stored value of `name`, or `neutral` if the request left it neutral; both have the same type."""
        for key, value in self.entries:
            if key == name:
                return cast("_Value", value)
        return neutral

    def without(self, name: str) -> SamplingSpec:
        """A copy with `name` left neutral."""
        return SamplingSpec(tuple(entry for entry in self.entries if entry[0] != name))

    def put(self, name: str, value: SamplingValue) -> SamplingSpec:
        """A copy with another value of `name`."""
        return SamplingSpec(tuple(sorted((*(entry for entry in self.entries if entry[0] != name), (name, value)))))

    def has(self, name: str) -> bool:
        """Whether `name` was given a value that is not neutral."""
        return any(key == name for key, _ in self.entries)


NEUTRAL = SamplingSpec()
