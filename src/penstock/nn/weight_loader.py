"""Where models get their tensors from: the part of a binder that models see.

Decides the signature only. Does not know files, dtypes on disk or quantisation. Implementations return tensors of the
final dtype on the final device, and raise an error that names any tensor that is missing or has another shape.
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
    """A checkpoint's tensors, each to be taken or ignored by name."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations and of every plain tensor."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        ...

    @property
    def predicts(self) -> bool:
        """Whether a part of the checkpoint that predicts a second token is wanted (`Program.predictor`)."""
        ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have `shape`, in `dtype` or else the loader's dtype; owned by the caller."""
        ...

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Tensors stacked in the given order: `[N1, K], [N2, K], ...` to `[N1 + N2 + ..., K]`; vectors likewise."""
        ...

    def take_linear(self, parts: Sequence[tuple[str, tuple[int, int]]], *, transposed: bool = False) -> Weight:
        """The weight of a projection, parts `[N1, K], [N2, K], ...` stacked, in whatever form projections are kept.

        Args:
            parts: name and shape of each part, outputs first.
            transposed: the checkpoint stores the parts inputs first (GPT-2's Conv1D).
        """
        ...

    def take_table(self, name: str, shape: tuple[int, int]) -> Weight:
        """An embedding table `[V, H]`, in a form that can also serve as the weight of a tied head."""
        ...

    def take_router(self, name: str, shape: tuple[int, int]) -> Weight:
        """The router weight `[E, H]`, which scores experts for tokens: a projection never rounded below the dtype."""
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
            parts: name and shape `[N1, K], [N2, K], ...` of the parts of one expert, stacked in this order. `{expert}`
                in a name stands for 0 to E - 1, one tensor each; a name without it is one tensor `[E, N, K]`.
            transposed: files store each expert inputs first.
            alternates: files interleave the rows of a part's two halves (gates and ups of gpt-oss); the stack has one
                half before the other.
        """
        ...

    def split_rows(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """Give rows of a matrix names of their own: for checkpoints that join several tensors in one.

        Args:
            name: the matrix; it counts as taken.
            shape: its required shape, `[N, K]`.
            parts: maps the new name of each part to its rows (int64 `[R]`) and its shape, R * K numbers in all.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the checkpoint; the tensor does not count as taken."""
        ...

    def differ(self, first: str, second: str) -> bool:
        """Whether two tensors of the checkpoint differ, in shape or in any number; neither counts as taken."""
        ...

    def ignore(self, name: str) -> None:
        """Declare that the tensor `name`, if there is one, is not needed."""
        ...

    def leave_out(self, part: str) -> None:
        """Declare that the model does not compute the tensors whose names begin with `part`."""
        ...


class PartLoader:
    """A `WeightLoader` for one part of a larger model, for example the text model of a vision-language model.

    Args:
        weights: the loader of the whole checkpoint.
        prefixes: maps a prefix of names to the prefix that the checkpoint has in its place; the first match applies.
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

    @property
    def predicts(self) -> bool:
        """See `WeightLoader.predicts`."""
        return self._weights.predicts

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightLoader.take`."""
        return self._weights.take(self._stored(name), shape, dtype)

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """See `WeightLoader.take_fused`."""
        return self._weights.take_fused([(self._stored(name), shape) for name, shape in parts])

    def take_linear(self, parts: Sequence[tuple[str, tuple[int, int]]], *, transposed: bool = False) -> Weight:
        """See `WeightLoader.take_linear`."""
        return self._weights.take_linear([(self._stored(name), shape) for name, shape in parts], transposed=transposed)

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
