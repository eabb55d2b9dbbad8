"""Rows of a stored matrix as separate tensors, for checkpoints that fuse matrices that a model multiplies separately.

Decides how a part is read; the family decides which rows belong to it. Caches only the matrix that was read last,
because parts of the same matrix are requested one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.source import StoredBlocks, TensorSource

__all__ = ["RowPart", "RowParts"]


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """A tensor made of rows of another tensor.

    Attributes:
        of: the name of the stored matrix `[N, K]`.
        rows: int64 `[R]`, row indices in the part's order.
        shape: the part's shape, of R * K elements in row-major order.
    """

    of: str
    rows: Tensor
    shape: tuple[int, ...]


class RowParts(TensorSource):
    """The tensors of `source`, and parts of them.

    Args:
        source: source of the matrices that are split.

    Attributes:
        parts: the parts by name.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.parts: dict[str, RowPart] = {}
        self._latest: tuple[tuple[str, object], Any] = ("", None), None

    @property
    def whole_bytes(self) -> int:
        """Bytes of the largest matrix that is split, in float32; it stays in memory while its parts are read."""
        sizes = [math.prod(self._source.shape(part.of)) for part in self.parts.values()]
        return 4 * max(sizes, default=0)

    def names(self) -> frozenset[str]:
        """The names of all tensors, parts included."""
        return self._source.names() | self.parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor or part."""
        return self.parts[name].shape if name in self.parts else self._source.shape(name)

    def stored_kind(self, name: str) -> str:
        """See `TensorSource.stored_kind`."""
        return self._source.stored_kind(self.parts[name].of if name in self.parts else name)

    def spare(self, name: str) -> bool:
        """See `TensorSource.spare`; parts are never spare."""
        return name not in self.parts and self._source.spare(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        if name not in self.parts:
            self._source.read_into(name, out)
        elif not out.is_meta:
            part = self.parts[name]
            out.copy_(self._whole(part.of, out.dtype)[part.rows].view(part.shape))

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """See `TensorSource.read_slice_into`."""
        if name not in self.parts:
            self._source.read_slice_into(name, index, out)
        elif not out.is_meta:
            rows = self._slice_rows(self.parts[name], index)
            out.copy_(self._whole(self.parts[name].of, out.dtype)[rows].view(out.shape))

    def read_blocks(self, name: str) -> StoredBlocks:
        """See `TensorSource.read_blocks`."""
        if name not in self.parts:
            return self._source.read_blocks(name)
        return self._blocks(self.parts[name], self.parts[name].rows)

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:
        """See `TensorSource.read_slice_blocks`."""
        if name not in self.parts:
            return self._source.read_slice_blocks(name, index)
        return self._blocks(self.parts[name], self._slice_rows(self.parts[name], index))

    def _blocks(self, part: RowPart, rows: Tensor) -> StoredBlocks:
        if part.shape[-1] != self._source.shape(part.of)[-1]:
            raise ModelFileError("", part.of, "has parts that are no whole rows")
        blocks: StoredBlocks = self._kept((part.of, "blocks"), lambda: self._source.read_blocks(part.of))
        return blocks if blocks.data.is_meta else StoredBlocks(blocks.kind, blocks.data[rows])

    @staticmethod
    def _slice_rows(part: RowPart, index: int) -> Tensor:
        return part.rows.view(part.shape[0], -1)[index]

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        numbers: Tensor = self._kept((name, dtype), lambda: self._source.read(name, dtype, "cpu"))
        return numbers

    def _kept(self, what: tuple[str, object], read: Callable[[], Any]) -> Any:
        """The last result if it was for the same `what`; otherwise the result of `read`."""
        if self._latest[0] != what:
            self._latest = ("", None), None  # free before the next one is read
            self._latest = what, read()
        return self._latest[1]
