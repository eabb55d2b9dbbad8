"""Where models get their tensors from: the part of a binder that they see.

Decides the signature only. Does not know files, dtypes on disk or quantisation; whoever implements it answers with
tensors of the final dtype on the final device, and fails by name on whatever is missing or has another shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.experts import StackedWeight
from penstock.kernels.linear import Weight

__all__ = ["PartLoader", "WeightLoader"]


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

    def take_stack(
        self,
        experts: int,
        parts: Sequence[tuple[str, tuple[int, int]]],
        *,
        transposed: bool = False,
        alternates: bool = False,
    ) -> StackedWeight:
        """The weights `[E, N1 + N2 + ..., K]` of a layer's experts, in whatever form projections are kept.

        Args:
            experts: E.
            parts: name and shape `[N1, K], [N2, K], ...` of what makes up one expert, stacked in this order. `{expert}`
                in a name stands for the numbers from 0 to E - 1, a tensor each; a name without it is one tensor
                `[E, N, K]`.
            transposed: files store each expert inputs first.
            alternates: rows of a part are the first of one half, the first of the other, the second of the one, and so
                on (gates and ups of gpt-oss); the stack has one half before the other.
        """
        ...

    def split_rows(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """Know the rows of a matrix under other names from here on: for checkpoints that join several tensors in one.

        Args:
            name: of the matrix; it counts as taken.
            shape: that it must have, `[N, K]`.
            parts: by the name that a part is then taken by, its rows (int64 `[R]`) and its shape, R times K numbers.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the checkpoint holds; it does not count as taken."""
        ...

    def differ(self, first: str, second: str) -> bool:
        """Whether two tensors of the checkpoint hold different numbers; neither counts as taken."""
        ...

    def ignore(self, name: str) -> None:
        """State that the tensor `name`, if there is one, is not needed."""
        ...

    def leave_out(self, part: str) -> None:
        """State that a part of the checkpoint, every tensor whose name begins with `part`, is not computed."""
        ...


class PartLoader:
    """A `WeightLoader` of a part of a larger model, such as the text model of one that sees images too.

    Args:
        weights: the whole checkpoint's.
        prefixes: what the checkpoint puts in place of the beginning of a name, by that beginning; the first that fits.
    """

    def __init__(self, weights: WeightLoader, prefixes: Mapping[str, str]) -> None:
        self._weights = weights
        self._prefixes = dict(prefixes)

    @property
    def dtype(self) -> torch.dtype:
        """See `WeightLoader.dtype`."""
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        """See `WeightLoader.device`."""
        return self._weights.device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightLoader.take`."""
        return self._weights.take(self._stored(name), shape, dtype)

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """See `WeightLoader.take_fused`."""
        return self._weights.take_fused([(self._stored(name), shape) for name, shape in parts])

    def take_linear(self, parts: Sequence[tuple[str, tuple[int, int]]], *, transposed: bool = False) -> Weight:
        """See `WeightLoader.take_linear`."""
        return self._weights.take_linear([(self._stored(name), shape) for name, shape in parts], transposed=transposed)

    def take_head(self, name: str, shape: tuple[int, int]) -> Weight:
        """See `WeightLoader.take_head`."""
        return self._weights.take_head(self._stored(name), shape)

    def take_table(self, name: str, shape: tuple[int, int]) -> Weight:
        """See `WeightLoader.take_table`."""
        return self._weights.take_table(self._stored(name), shape)

    def take_router(self, name: str, shape: tuple[int, int]) -> Weight:
        """See `WeightLoader.take_router`."""
        return self._weights.take_router(self._stored(name), shape)

    def take_stack(
        self,
        experts: int,
        parts: Sequence[tuple[str, tuple[int, int]]],
        *,
        transposed: bool = False,
        alternates: bool = False,
    ) -> StackedWeight:
        """See `WeightLoader.take_stack`."""
        stored = [(self._stored(name), shape) for name, shape in parts]
        return self._weights.take_stack(experts, stored, transposed=transposed, alternates=alternates)

    def split_rows(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """See `WeightLoader.split_rows`."""
        self._weights.split_rows(self._stored(name), shape, {self._stored(part): each for part, each in parts.items()})

    def has(self, name: str) -> bool:
        """See `WeightLoader.has`."""
        return self._weights.has(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightLoader.shape`."""
        return self._weights.shape(self._stored(name))

    def differ(self, first: str, second: str) -> bool:
        """See `WeightLoader.differ`."""
        return self._weights.differ(self._stored(first), self._stored(second))

    def ignore(self, name: str) -> None:
        """See `WeightLoader.ignore`."""
        self._weights.ignore(self._stored(name))

    def leave_out(self, part: str) -> None:
        """See `WeightLoader.leave_out`."""
        self._weights.leave_out(self._stored(part))

    def _stored(self, name: str) -> str:
        found = next((prefix for prefix in self._prefixes if name.startswith(prefix)), None)
        return name if found is None else self._prefixes[found] + name[len(found) :]
