"""Register allocation: areas of scratch shared by registers with disjoint live ranges, and the dtype of each register.

Each layer may overwrite the same name; every such write begins a new live range (`_Life`). Inputs of projections with
bfloat16 weights are bfloat16, because they are multiplied as such; queries, keys and values have the model's dtype;
everything else is float32. Adapters, which read a projection's input and add to its output, do not change this: a
register has the same dtype with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penstock.nn.lowering import Attended, Gated, Lowered, operands
from penstock.nn.operations import Adapt, Linear, ProjectHeads, Register, Regroup
from penstock.nn.program import OUT, STREAM

__all__ = ["Place", "Places", "place_registers"]

_FIXED = {STREAM: 0, OUT: 1}
"""Registers that the caller owns, and their numbers in the compiled program."""


class Place(NamedTuple):
    """Width, dtype and area of a register during one live range.

    `product` says whether a product or attention writes the register. The threads of a team share such registers, and
    each has its own copy of all others (`native/team.h`), so a register cannot change from one kind to the other.
    """

    width: int
    dtype: torch.dtype
    area: int
    product: bool


@dataclass(slots=True)
class _Life:
    """A live range: from the operation that overwrites a register to the last one that reads it."""

    width: int
    begin: int
    end: int
    readers: list[Lowered] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    area: int = -1
    product: bool = False


class Places:
    """The place of every register at every operation. Immutable once made by `place_registers`.

    Attributes:
        area_bytes: size of each area for one token, in bytes.
    """

    def __init__(self, lives: dict[str, list[_Life]], area_bytes: list[int]) -> None:
        self._lives = lives
        self.area_bytes = tuple(area_bytes)

    def distinct(self) -> list[Place]:
        """All distinct places, in a fixed order."""
        return sorted({_place(life) for lives in self._lives.values() for life in lives}, key=str)

    def resolve(self, numbers: dict[Place, int], inputs: Mapping[str, int]) -> Callable[[int, str], int]:
        """Make the function from an operation's index and a name to a register number; `inputs` already have theirs."""
        fixed = {**_FIXED, **inputs}

        def number(index: int, name: str) -> int:
            if name in fixed:
                return fixed[name]
            return numbers[_place(_at(self._lives, name, index))]

        return number


def place_registers(operations: Sequence[Lowered], dtype: torch.dtype, inputs: Sequence[Register] = ()) -> Places:
    """Find live ranges, dtypes and areas.

    Args:
        operations: all operations of a program.
        dtype: dtype of queries, keys and values.
        inputs: further registers that the caller owns (`Program.inputs`).
    """
    lives = _lives(operations, {*_FIXED, *(each.name for each in inputs)})
    in_order = sorted((life for each in lives.values() for life in each), key=lambda life: life.begin)
    for life in in_order:
        life.dtype = _dtype(life, dtype)
    for index, operation in enumerate(operations):
        if isinstance(operation, Attended):
            _at(lives, operation.rotated.name, index).dtype = _query_dtype(operations, lives, index, operation)
    return Places(lives, _share_areas(in_order))


def _place(life: _Life) -> Place:
    return Place(life.width, life.dtype, life.area, life.product)


def _lives(operations: Sequence[Lowered], owned: Container[str]) -> dict[str, list[_Life]]:
    lives: dict[str, list[_Life]] = {}
    for index, operation in enumerate(operations):
        read, written = operands(operation)
        for register in read:
            if register.name not in owned:
                life = lives[register.name][-1]
                life.end = index
                life.readers.append(operation)
        for register in written:
            if register.name not in owned and register.name not in {each.name for each in read}:
                lives.setdefault(register.name, []).append(_Life(_width(register), index, index))
            if register.name not in owned:
                lives[register.name][-1].product |= _is_product(operation, register)
    return lives


def _is_product(operation: Lowered, written: Register) -> bool:
    """Whether a team's threads divide the work of writing `written`; no team computes programs with other products."""
    if isinstance(operation, Attended):
        return written.name != operation.rotated.name
    return isinstance(operation, Linear | Gated)


def _width(register: Register) -> int:
    assert register.first == 0, f"{register} is not written as a whole first"
    return register.width


def _at(lives: dict[str, list[_Life]], name: str, index: int) -> _Life:
    """The live range of `name` at an operation's index."""
    return next(life for life in lives[name] if life.begin <= index <= life.end)


def _dtype(life: _Life, dtype: torch.dtype) -> torch.dtype:
    readers = [reader for reader in life.readers if not isinstance(reader, Adapt)]
    if any(isinstance(reader, Attended) for reader in readers):
        return dtype
    projections = [_projection(reader) for reader in readers]
    rounded = projections and all(each is not None and _is_bf16(each) for each in projections)
    return torch.bfloat16 if rounded else torch.float32


def _query_dtype(
    operations: Sequence[Lowered], lives: dict[str, list[_Life]], index: int, attended: Attended
) -> torch.dtype:
    """Dtype of rotated queries: bfloat16 if bfloat16 weights projected them, else float32."""
    begin = _at(lives, attended.attend.q.name, index).begin
    written = operations[begin]
    if isinstance(written, Regroup):
        written = operations[_at(lives, written.x.name, begin).begin]
    projection = _projection(written)
    return torch.bfloat16 if projection is not None and _is_bf16(projection) else torch.float32


def _projection(operation: Lowered) -> Linear | ProjectHeads | None:
    if isinstance(operation, Gated):
        return operation.linear
    return operation if isinstance(operation, Linear | ProjectHeads) else None


def _is_bf16(projection: Linear | ProjectHeads) -> bool:
    of = projection if isinstance(projection, ProjectHeads) else projection.weight
    return of.arithmetic == "bf16"


def _share_areas(lives: Sequence[_Life]) -> list[int]:
    """Give each live range an area that no overlapping one has; return the bytes per token of each area."""
    sizes: list[int] = []
    busy: list[int] = []  # for each area, the last operation that needs its contents
    for life in lives:
        wanted = life.width * life.dtype.itemsize
        free = [area for area, until in enumerate(busy) if until < life.begin]
        if free:
            life.area = min(free, key=lambda area: (abs(sizes[area] - wanted), area))
        else:
            life.area = len(sizes)
            sizes.append(0)
            busy.append(-1)
        sizes[life.area] = max(sizes[life.area], wanted)
        busy[life.area] = life.end
    return sizes
