"""A checkpoint's headers as a source of tensors without memory, for a model that is planned and not loaded.

A binder on torch's `meta` device takes every tensor from this source as it would from the files: names, shapes and
weight formats are checked the same way and every size is real, but no numbers are read.
"""

from __future__ import annotations

import torch

from penstock.weights.source import StoredBlocks, TensorSource

__all__ = ["META", "HeadersOnly"]

META = torch.device("meta")


class HeadersOnly(TensorSource):
    """The names, shapes and kinds of `source`'s tensors, without their numbers."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def names(self) -> frozenset[str]:
        """See `TensorSource.names`."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._source.shape(name)

    def stored_kind(self, name: str) -> str:
        """See `TensorSource.stored_kind`."""
        return self._source.stored_kind(name)

    def spare(self, name: str) -> bool:
        """See `TensorSource.spare`; may read real numbers."""
        return self._source.spare(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Do nothing for a `meta` tensor; fill any other, because its caller needs the real numbers."""
        if not out.is_meta:
            self._source.read_into(name, out)

    def read_slice_into(self, name: str, index: int, out: torch.Tensor) -> None:
        """Like `read_into`."""
        if not out.is_meta:
            self._source.read_slice_into(name, index, out)

    def read_blocks(self, name: str) -> StoredBlocks:
        """The kind of the blocks, without their bytes."""
        return StoredBlocks(self.stored_kind(name), torch.empty(0, dtype=torch.uint8, device=META))

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:  # noqa: ARG002 - slices are all of one kind
        """Like `read_blocks`."""
        return self.read_blocks(name)
