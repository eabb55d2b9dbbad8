"""Gives parts of stored matrices their own names: some rows and columns, for a rank that has a share of a model.

Decides how a part is read: its whole matrix is read and kept until another matrix is read, because parts of the same
matrix are requested one after the other. Quantised matrices are cut only between blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.kernels.packed_layout import F8_UNIT
from penstock.weights.gguf_header import READABLE_TYPES
from penstock.weights.integer_blocks import INTEGER_BLOCKS
from penstock.weights.source import StoredBlocks, TensorSource, rows_joined

__all__ = ["Ranges", "SharedTensors", "block_inputs"]

Ranges = tuple[range, ...]
"""Which rows or columns of a matrix, in order; each range has a step of 1."""

_BLOCKS = {kind.name: (kind.elements, kind.bytes) for kind in READABLE_TYPES.values()} | {
    name: (block.inputs, block.bytes) for name, block in INTEGER_BLOCKS.items()
}
"""Inputs and bytes of a block, by its kind."""

_SCALE_BYTES = 4
"""Bytes of an FP8 scale; FP8 rows begin with one scale per 128 inputs."""


def block_inputs(kind: str) -> int:
    """Number of inputs in a block of this kind; rows can be cut at multiples of it."""
    return F8_UNIT if kind == "FP8" else _BLOCKS[kind][0]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows and columns of a stored matrix, or of each slice of a stack of them; None for all."""

    of: str
    rows: Ranges | None
    columns: Ranges | None


class SharedTensors(TensorSource):
    """The tensors of `source`, and parts of its matrices.

    Args:
        source: where the matrices come from.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._parts: dict[str, _Part] = {}
        self._latest: tuple[object, Any] = None, None

    def part(self, of: str, rows: Ranges | None, columns: Ranges | None) -> str:
        """Name a part of the matrix or stack `of`, cut in its last two dimensions."""
        if rows is None and columns is None:
            return of
        cuts = (",".join(f"{each.start}:{each.stop}" for each in cut or ()) for cut in (rows, columns))
        name = f"{of}[{';'.join(cuts)}]"
        self._parts[name] = _Part(of, rows, columns)
        return name

    def names(self) -> frozenset[str]:
        """The names of all tensors, parts included."""
        return self._source.names() | self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.shape(name)
        *outer, rows, columns = self._source.shape(part.of)
        return (*outer, _count(part.rows, rows), _count(part.columns, columns))

    def stored_kind(self, name: str) -> str:
        """See `TensorSource.stored_kind`."""
        return self._source.stored_kind(self._parts[name].of if name in self._parts else name)

    def spare(self, name: str) -> bool:
        """See `TensorSource.spare`."""
        return name not in self._parts and self._source.spare(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """See `TensorSource.read_into`."""
        part = self._parts.get(name)
        if part is None:
            self._source.read_into(name, out)
        elif not out.is_meta:
            whole = self._kept((part.of, out.dtype), lambda: self._source.read(part.of, out.dtype, "cpu"))
            out.copy_(_taken(whole, part.rows, part.columns))

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """See `TensorSource.read_slice_into`."""
        part = self._parts.get(name)
        if part is None:
            self._source.read_slice_into(name, index, out)
        elif not out.is_meta:
            whole = torch.empty(self._source.shape(part.of)[1:], dtype=out.dtype)
            self._source.read_slice_into(part.of, index, whole)
            out.copy_(_taken(whole, part.rows, part.columns))

    def read_blocks(self, name: str) -> StoredBlocks:
        """See `TensorSource.read_blocks`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.read_blocks(name)
        blocks: StoredBlocks = self._kept((part.of, "blocks"), lambda: self._source.read_blocks(part.of))
        return _taken_blocks(blocks, part, self._source.shape(part.of)[-1])

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:
        """See `TensorSource.read_slice_blocks`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.read_slice_blocks(name, index)
        return _taken_blocks(self._source.read_slice_blocks(part.of, index), part, self._source.shape(part.of)[-1])

    def rounded(self) -> dict[str, int]:
        """See `TensorSource.rounded`."""
        return dict(self._source.rounded())

    def unheeded(self) -> Sequence[str]:
        """See `TensorSource.unheeded`."""
        return self._source.unheeded()

    def forget(self) -> None:
        """Free the matrix that was read last."""
        self._latest = None, None

    def _kept(self, what: object, read: Callable[[], Any]) -> Any:
        """The last result if it was for the same `what`; otherwise the result of `read`."""
        if self._latest[0] != what:
            self._latest = None, None  # free before the next one is read
            self._latest = what, read()
        return self._latest[1]


def _count(ranges: Ranges | None, whole: int) -> int:
    return whole if ranges is None else sum(map(len, ranges))


def _taken(matrix: Tensor, rows: Ranges | None, columns: Ranges | None) -> Tensor:
    if rows is not None:
        matrix = rows_joined([matrix[each.start : each.stop] for each in rows])
    if columns is not None:
        matrix = torch.cat([matrix[:, each.start : each.stop] for each in columns], dim=1)
    return matrix


def _taken_blocks(blocks: StoredBlocks, part: _Part, inputs: int) -> StoredBlocks:
    """The blocks of some rows and columns; columns begin and end where blocks do."""
    if blocks.data.is_meta:
        return blocks
    columns = None if part.columns is None else _byte_columns(blocks.kind, part.columns, inputs, part.of)
    return StoredBlocks(blocks.kind, _taken(blocks.data, part.rows, columns).contiguous())


def _byte_columns(kind: str, columns: Ranges, inputs: int, name: str) -> Ranges:
    """Where the blocks of some columns lie in a row of bytes."""
    unit = block_inputs(kind)
    if any(each.start % unit or (each.stop % unit and each.stop != inputs) for each in columns):
        raise ModelFileError("", name, f"is stored in blocks of {unit} inputs, which cannot be cut")
    cut = [range(each.start // unit, -(-each.stop // unit)) for each in columns]  # in blocks
    if kind != "FP8":
        size = _BLOCKS[kind][1]
        return tuple(range(each.start * size, each.stop * size) for each in cut)
    scales = _SCALE_BYTES * -(-inputs // unit)
    of_scales = [range(each.start * _SCALE_BYTES, each.stop * _SCALE_BYTES) for each in cut]
    return (*of_scales, *(range(scales + each.start, scales + each.stop) for each in columns))
