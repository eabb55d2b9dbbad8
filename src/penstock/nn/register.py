"""Registers, the operands of operations: matrices with one row per token of a step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Register"]


@dataclass(frozen=True, slots=True)
class Register:
    """Columns `[first, first + width)` of the register `name`: `[T, width]`."""

    name: str
    width: int
    first: int = 0
    is_part: bool = False

    def columns(self, first: int, width: int) -> Register:
        """A sub-range of these columns; `first` counts from this register's own first column."""
        assert first >= 0, first
        assert first + width <= self.width, f"{self} has no columns {first} to {first + width}"
        return Register(self.name, width, self.first + first, is_part=True)

    def __str__(self) -> str:
        return f"{self.name}[{self.first}:{self.first + self.width}]" if self.is_part else self.name

    def line(self, text: str, *, adds: bool = False) -> str:
        """Format the operation `text`, which writes these columns, as a line of a printed program."""
        return f"{self!s:<8} <- {f'{self} + ' if adds else ''}{text}"
