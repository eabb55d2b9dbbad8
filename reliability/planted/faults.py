"""Defines which requests fail, and how: a mark in a prompt of token ids, and the faults that it may name.

A mark is three token ids in a row that occur in no text of the rows; the last one names the fault. It stays in the
sequence's tokens, so a request fails again wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FAULTS", "fault_in", "mark"]

FAULTS = ("raises", "segfaults", "aborts", "exits", "hangs", "spins", "is not a number", "lacks memory", "is killed")
"""What a step with a row of a marked request does."""

_FIRST, _SECOND, _NAMES = 47_001, 47_003, 47_100


def mark(fault: str) -> list[int]:
    """Return the token ids that make a request fail."""
    return [_FIRST, _SECOND, _NAMES + FAULTS.index(fault)]


def fault_in(tokens: Sequence[int]) -> str:
    """Return the fault that a sequence's tokens name; "" for none."""
    for at in range(len(tokens) - 2):
        number = tokens[at + 2] - _NAMES
        if tokens[at] == _FIRST and tokens[at + 1] == _SECOND and 0 <= number < len(FAULTS):
            return FAULTS[number]
    return ""
