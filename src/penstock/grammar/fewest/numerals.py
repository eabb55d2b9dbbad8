"""JSON numbers within bounds, digit by digit: a `lexemes.Lexeme`.

Whether a number is in a range or a multiple of a step is decided exactly, in decimal digits. Numbers are written as in
RFC 8259; integers, and numbers with bounds or a step, take no exponent, as in llguidance.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

__all__ = ["Bound", "Number"]


class _Part(enum.IntEnum):
    """The part of a number that was written last."""

    NOTHING = 0
    SIGN = 1
    ZERO = 2
    WHOLE = 3
    POINT = 4
    DECIMALS = 5
    E = 6
    E_SIGN = 7
    POWER = 8


@dataclass(frozen=True, slots=True)
class _Figures:
    """The state of a number that is partly written: only the facts that decide what it may become.

    Attributes:
        part: the part that was written last.
        signs: per bound, the sign of the number's digits so far minus the bound's, both without their minus.
        negative: whether it has a minus.
        whole: how many digits come before the point, up to one more than any bound has.
        decimals: how many come after it, up to one more than any bound or the step has.
        zero: whether all digits are 0.
        rest: the remainder of all digits as one integer, divided by the step as an integer.
    """

    part: _Part
    signs: tuple[int, ...]
    negative: bool = False
    whole: int = 0
    decimals: int = 0
    zero: bool = True
    rest: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound of a range of numbers.

    Attributes:
        value: the bound.
        upward: whether larger numbers are in the range; else smaller ones are.
        is_open: whether `value` itself is excluded.
    """

    value: Decimal
    upward: bool
    is_open: bool

    @property
    def whole(self) -> str:
        """The digits before the point, without sign."""
        return f"{abs(self.value):f}".partition(".")[0]

    @property
    def decimals(self) -> str:
        """The digits after the point, without trailing zeros."""
        return f"{abs(self.value):f}".partition(".")[2].rstrip("0")

    def digit(self, at: int, behind_point: bool) -> int:
        """The digit at index `at` before or after the point; 0 past the last."""
        digits = self.decimals if behind_point else self.whole
        return int(digits[at]) if at < len(digits) else 0

    def holds(self, figures: _Figures, sign: int) -> bool:
        """Whether a number is within the bound; `sign` is that of its digits minus the bound's."""
        if figures.whole != len(self.whole):
            sign = 1 if figures.whole > len(self.whole) else -1
        elif sign == 0 and any(digit != "0" for digit in self.decimals[figures.decimals :]):
            sign = -1
        if figures.zero and self.value == 0:
            sign = 0
        elif figures.negative != (self.value < 0):
            sign = -1 if figures.negative else 1
        elif figures.negative:
            sign = -sign
        return not self.is_open if sign == 0 else (sign > 0) == self.upward


class Number:
    """A JSON number within bounds, a multiple of `step` if there is one, and an integer if it is `whole`."""

    def __init__(self, bounds: Sequence[Bound] = (), step: Decimal | None = None, whole: bool = False) -> None:
        self._bounds, self._whole = bounds, whole
        self._places = 0
        self._modulus = 1
        self._has_step = step is not None
        if step is not None:
            self._places = len(f"{step:f}".partition(".")[2].rstrip("0"))
            self._modulus = int(step.scaleb(self._places))
        self._most_whole = max((len(bound.whole) for bound in bounds), default=0) + 1
        self._most_decimals = max((self._places, *(len(bound.decimals) for bound in bounds))) + 1
        self.start = _Figures(_Part.NOTHING, (0,) * len(bounds))

    def after(self, state: _Figures, byte: int) -> _Figures | None:
        """See `lexemes.Lexeme`."""
        if 0x30 <= byte <= 0x39:
            return self._digit(state, byte - 0x30)
        match chr(byte), state.part:
            case "-", _Part.NOTHING:
                return replace(state, part=_Part.SIGN, negative=True)
            case ".", (_Part.ZERO | _Part.WHOLE) if not self._whole:
                return replace(state, part=_Part.POINT)
            case (("e" | "E"), (_Part.ZERO | _Part.WHOLE | _Part.DECIMALS)) if self._is_free:
                return _Figures(_Part.E, ())
            case (("+" | "-"), _Part.E):
                return replace(state, part=_Part.E_SIGN)
        return None

    def candidates(self, _state: _Figures) -> Iterable[int]:
        """See `lexemes.Lexeme`."""
        return b"0123456789-+.eE"

    def accepts(self, state: _Figures) -> bool:
        """See `lexemes.Lexeme`."""
        if state.part not in (_Part.ZERO, _Part.WHOLE, _Part.DECIMALS):
            return state.part is _Part.POWER
        if state.zero and state.negative and self._bounds:  # -0 is allowed only without bounds
            return False
        left = 10 ** max(self._places - state.decimals, 0)
        is_multiple = state.rest * left % self._modulus == 0 if self._modulus else state.zero
        return is_multiple and all(
            bound.holds(state, sign) for bound, sign in zip(self._bounds, state.signs, strict=True)
        )

    def kin(self, state: _Figures) -> tuple[_Figures, int]:
        """See `lexemes.Lexeme`."""
        return state, 0

    @property
    def _is_free(self) -> bool:
        return not (self._whole or self._bounds or self._has_step)

    def _digit(self, state: _Figures, digit: int) -> _Figures | None:
        if state.part >= _Part.E:
            return replace(state, part=_Part.POWER)
        if state.part is _Part.ZERO:
            return None
        behind = state.part >= _Part.POINT
        if self._has_step and state.decimals >= self._places and behind and digit:
            return None
        at = state.decimals if behind else state.whole
        pairs = zip(self._bounds, state.signs, strict=True)
        signs = tuple(sign or _sign(digit - bound.digit(at, behind)) for bound, sign in pairs)
        counted = not (behind and at >= self._places)
        rest = (state.rest * 10 + digit) % (self._modulus or 1) if counted else state.rest
        further = replace(state, signs=signs, zero=state.zero and not digit, rest=rest)
        if behind:
            return replace(further, part=_Part.DECIMALS, decimals=min(at + 1, self._most_decimals))
        part = _Part.WHOLE if digit or state.whole else _Part.ZERO
        return replace(further, part=part, whole=min(at + 1, self._most_whole))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
