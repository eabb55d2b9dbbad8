"""A model built from a checkpoint's names, shapes and settings alone: to compare two, or to see what uses a tensor."""

from __future__ import annotations

from torch import Tensor

from penstock.weights.headers_only import HeadersOnly

__all__ = ["Blank"]


class Blank(HeadersOnly):
    """A checkpoint's names and shapes, for a dense binder with real memory; its numbers are whatever memory holds."""

    def stored_kind(self, name: str) -> str:  # noqa: ARG002
        """None: a dense binder reads no blocks."""
        return ""

    def read_into(self, name: str, out: Tensor) -> None:
        """Leave the memory as it is."""

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """Leave the memory as it is."""
