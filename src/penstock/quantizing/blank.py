"""A model built from a checkpoint's names, shapes and settings alone: to compare two, or to see what uses a tensor."""

from __future__ import annotations

from torch import Tensor

from penstock.weights.source import StoredBlocks, TensorSource

__all__ = ["Blank"]


class Blank(TensorSource):
    """A checkpoint's names and shapes; its numbers are whatever memory holds."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def names(self) -> frozenset[str]:
        """See `TensorSource.names`."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._source.shape(name)

    def spare(self, name: str) -> bool:
        """See `TensorSource.spare`; looks at real numbers."""
        return self._source.spare(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Leave the memory as it is."""

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """Leave the memory as it is."""

    def read_blocks(self, name: str) -> StoredBlocks:  # noqa: ARG002
        """Not called: a dense binder reads no blocks."""
        raise AssertionError("a dense binder reads no blocks")
