"""Where models get their tensors from: the part of a binder that they see.

Decides the signature only. Does not know files, dtypes on disk or quantisation; whoever implements it answers with
tensors of the final dtype on the final device, and fails by name on whatever is missing or has another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.experts import StackedWeight
from penstock.kernels.linear import Weight

__all__ = ["WeightLoader"]


class WeightLoader(Protocol):
    """A checkpoint's tensors, each to be taken or refused by name."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations, and of every plain tensor."""
        ...

    @property
    def device(self) -> torch.device:
        """Of every tensor."""
        ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have `shape`, in `dtype` or the loader's; owned by the caller."""
        ...

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Tensors stacked in the given order: `[N1, K], [N2, K], ...` to `[N1 + N2 + ..., K]`; vectors likewise."""
        ...

    def take_linear(self, parts: Sequence[tuple[str, tuple[int, int]]], *, transposed: bool = False) -> Weight:
        """The weight of a projection, in whatever form projections are kept: parts `[N1, K], [N2, K], ...` stacked.

        Args:
            parts: name and shape of each, outputs first.
            transposed: the checkpoint stores them inputs first (GPT-2's Conv1D).
        """
        ...

    def take_head(self, name: str, shape: tuple[int, int]) -> Weight:
        """The weight `[V, H]` of a head of its own: a projection whose results can be had unrounded."""
        ...

    def take_table(self, name: str, shape: tuple[int, int]) -> Weight:
        """An embedding table `[V, H]`, in a form that serves as the weight of a tied head too."""
        ...

    def take_router(self, name: str, shape: tuple[int, int]) -> Weight:
        """The weight `[E, H]` by which tokens choose experts: a projection that no form rounds below the dtype."""
        ...

    def take_stack(self, experts: int, parts: Sequence[tuple[str, tuple[int, int]]]) -> StackedWeight:
        """The weights `[E, N1 + N2 + ..., K]` of a layer's experts, in whatever form projections are kept.

        Args:
            experts: E.
            parts: name and shape `[N1, K], [N2, K], ...` of what makes up one expert, stacked in this order. `{expert}`
                in a name stands for the numbers from 0 to E - 1, a tensor each; a name without it is one tensor
                `[E, N, K]`.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        ...

    def differ(self, first: str, second: str) -> bool:
        """Whether two tensors of the checkpoint hold different numbers; neither counts as taken."""
        ...

    def ignore(self, name: str) -> None:
        """State that the tensor `name`, if there is one, is not needed."""
        ...
