"""A source for building a model without its numbers: to compare two models, or to see how each tensor is used."""

from __future__ import annotations

from torch import Tensor

from penstock.weights.headers_only import HeadersOnly

__all__ = ["Blank"]


class Blank(HeadersOnly):
    """A checkpoint's names and shapes, for a dense binder with real memory; tensors are left uninitialised."""

    def stored_kind(self, name: str) -> str:  # noqa: ARG002
        """Always "": a dense binder reads no blocks."""
        return ""

    def read_into(self, name: str, out: Tensor) -> None:
        """Leave `out` uninitialised."""

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """Leave `out` uninitialised."""
