"""Decimal numbers in a range, as states and moves of an automaton over bytes; independent of what it judges."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from grammar_automaton import Automaton


class Digits:
    """Numbers without sign: each digit is compared with those of the bounds while all before it were equal."""

    def __init__(
        self, automaton: Automaton, end: int, low: Any, high: Any, modulus: int, fractions: bool, powers: bool
    ) -> None:
        self._automaton, self._end = automaton, end
        (self._low, self._low_open), (self._high, self._high_open) = low, high
        self._modulus, self._fractions, self._powers = modulus, fractions, powers
        self._decimals = max(len(_split(bound)[1]) for bound in (self._low, self._high or 0))
        self._states: dict[Any, int] = {}

    def build(self, at: int) -> None:
        shortest = len(_split(self._low)[0])
        longest = shortest + 1 if self._high is None else len(_split(self._high)[0])
        for size in range(shortest, longest + 1):
            tied = size == shortest, self._high is not None and size == longest
            self._automaton.skip(at, self._state(size, 0, tied, 0))

    def _state(self, size: int, at: int, tied: tuple[bool, bool], rest: int) -> int:
        """The state after `at` digits of a number with `size` before the point; `tied`: equal so far to each bound."""
        key = (size, at, tied, rest)
        if key in self._states:
            return self._states[key]
        here = self._states[key] = self._automaton.state()
        if at >= size and rest == 0 and self._lies_within(size, at, tied):
            self._automaton.skip(here, self._end)
            if self._powers:
                self._power(here)
        if at == size and self._fractions:
            dot = self._automaton.text(here, b".")
            self._digits(dot, size, at, tied, 0)
        if at != size:
            self._digits(here, size, at, tied, rest)
        elif self._high is None and size > len(_split(self._low)[0]):
            self._digits(here, size, at - 1, tied, rest)
        return here

    def _digits(self, here: int, size: int, at: int, tied: tuple[bool, bool], rest: int) -> None:
        low, high = (self._digit(bound, size, at) for bound in (self._low, self._high))
        for digit in range(1 if at == 0 and size > 1 else 0, 10):
            if not (tied[0] and digit < low) and not (tied[1] and digit > high):
                after = tied[0] and digit == low, tied[1] and digit == high
                remainder = (rest * 10 + digit) % self._modulus
                to = self._state(size, min(at + 1, size + self._decimals + 1), after, remainder)
                self._automaton.move(here, 0x30 + digit, 0x30 + digit, to)

    def _digit(self, bound: Decimal | None, size: int, at: int) -> int:
        whole, decimals = _split(bound or 0)
        return int((whole.rjust(size, "0") + decimals + "0" * (at + 1))[at])

    def _lies_within(self, size: int, at: int, tied: tuple[bool, bool]) -> bool:
        below, above = (
            not any(self._digit(bound, size, place) for place in range(at, size + self._decimals + 1))
            for bound in (self._low, self._high)
        )  # only zeros follow
        if tied[0] and (self._low_open or not below):
            return False
        return not (tied[1] and self._high_open and above)

    def _power(self, at: int) -> None:
        sign, digits = self._automaton.state(), self._automaton.state()
        for mark in b"eE":
            self._automaton.move(at, mark, mark, sign)
        signed = self._automaton.state()
        self._automaton.skip(sign, signed)
        for mark in b"+-":
            self._automaton.move(sign, mark, mark, signed)
        for state in (signed, digits):
            self._automaton.move(state, 0x30, 0x39, digits)
        self._automaton.skip(digits, self._end)


def _split(number: Any) -> tuple[str, str]:
    """The digits before and behind the point."""
    whole, _, decimals = f"{abs(Decimal(number)):f}".partition(".")
    return whole, decimals.rstrip("0")
