"""A matrix of integers with scales and zero points, independent of the file's layout: its numbers, and its blocks.

Decides the common formula, `scale * (code - zero)` in float32, and which blocks can hold a matrix. Rows are outputs.
Does not know how files pack codes: each format supplies a function that reads rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.integer_blocks import INTEGER_BLOCKS, integer_block, to_blocks
from penstock.weights.source import PIECE_ELEMENTS, convert_into

__all__ = ["IntegerMatrix", "IntegerRows", "ReadRows", "place_numbers"]


@dataclass(frozen=True, slots=True, eq=False)
class IntegerRows:
    """Some rows of a matrix.

    Attributes:
        codes: uint8 `[N, K]`.
        scales: float32 `[N, G]`.
        zeros: uint8 `[N, G]`, the codes that represent zero.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor


ReadRows = Callable[[int, int], IntegerRows]
"""Reads rows `start` to `stop`, exclusive."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerMatrix:
    """Where a matrix is stored, and how to read it.

    Attributes:
        path: the file of the codes.
        shape: `[N, K]`.
        bits: bits per code: 4 or 8.
        group: inputs that share a scale and zero point.
        centred: whether the file's settings say that every zero point is half the code range.
        bytes: size in the files.
        open: reads what all rows need, and returns a function that reads rows.
        order: reads the group of each input, int64 `[K]`; None if the inputs of a group are neighbours.
    """

    path: Path
    shape: tuple[int, int]
    bits: int
    group: int
    centred: bool
    bytes: int
    open: Callable[[str], ReadRows]
    order: Callable[[str], Tensor] | None = None

    @property
    def dtype(self) -> str:
        """The stored type."""
        return f"INT{self.bits}"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    @property
    def kind(self) -> str:
        """The kind of block that holds the codes without loss; "" for none."""
        if self.order is not None:
            return ""
        return integer_block(self.bits, self.group, self.shape[1], centred=self.centred)

    def read_numbers(self, name: str, out: Tensor) -> bool:
        """Fill `out` `[N, K]`; returns whether any number was rounded."""
        inputs, read = self.shape[1], self.open(name)
        order = None if self.order is None else self.order(name)
        step, rounded = max(1, PIECE_ELEMENTS // inputs), False
        for start in range(0, self.shape[0], step):
            rows = self._read(read, start, min(start + step, self.shape[0]), name)
            numbers = rows.codes.float().sub_(self._spread(rows.zeros.float(), order))
            numbers.mul_(self._spread(rows.scales, order))
            rounded |= place_numbers(numbers, out[start : start + len(numbers)], self.path, name)
        return rounded

    def _spread(self, of_groups: Tensor, order: Tensor | None) -> Tensor:
        """Expand values per group, `[N, G]`, to values per input: `[N, K]`, or `[N, 1]` if there is one group."""
        if of_groups.shape[1] == 1:
            return of_groups
        if order is not None:
            return of_groups[:, order]
        return of_groups.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]

    def read_blocks(self, name: str) -> tuple[Tensor, bool]:
        """The blocks of all rows, uint8 `[N, bytes per row]`, and whether any scale was rounded to float16.

        Raises:
            ModelFileError: a scale is beyond the range of float16.
        """
        block, read = INTEGER_BLOCKS[self.kind], self.open(name)
        outputs, inputs = self.shape
        data = torch.empty(outputs, inputs // block.inputs * block.bytes, dtype=torch.uint8)
        step, rounded = max(1, PIECE_ELEMENTS // inputs), False
        for start in range(0, outputs, step):
            rows = self._read(read, start, min(start + step, outputs), name)
            scales = torch.empty(rows.scales.shape, dtype=torch.float16)
            rounded |= place_numbers(rows.scales, scales, self.path, name)
            data[start : start + step] = to_blocks(self.kind, rows.codes, scales, rows.zeros, self.group)
        return data, rounded

    def _read(self, read: ReadRows, start: int, stop: int, name: str) -> IntegerRows:
        rows = read(start, stop)
        if self.centred and bool((rows.zeros != 1 << (self.bits - 1)).any()):
            raise ModelFileError(
                str(self.path),
                name,
                f"has zero points other than {1 << (self.bits - 1)}, though quantization_config says that they are"
                " symmetric; say sym: false there",
            )
        return rows


def place_numbers(numbers: Tensor, out: Tensor, path: Path, name: str) -> bool:
    """Copy float32 numbers into `out` of the same shape; returns whether any number was rounded.

    Raises:
        ModelFileError: a finite number is beyond the range of `out`'s dtype.
    """
    convert_into(numbers, out, path, name)
    if torch.finfo(out.dtype).bits >= torch.finfo(numbers.dtype).bits:
        return False
    return not torch.equal(out.to(numbers.device, numbers.dtype).nan_to_num(), numbers.nan_to_num())
