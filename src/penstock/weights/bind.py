"""Binding: a model takes its weights by name, and nothing may be left over.

Decides that a checkpoint and a model agree exactly: every tensor is taken once with the expected shape or explicitly
ignored. Knows neither formats nor families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penstock.contract.errors import ModelFileError
from penstock.weights.source import TensorSource

__all__ = ["Binder"]

_NAMED_LEFTOVERS = 5


def _unseen(_: int) -> None:
    """Progress that nobody watches."""


class Binder:
    """Hands a model its tensors; owned by the one loading it, from construction to `finish`.

    Tensors are fresh and belong to the caller; at no time is more than one of them being filled, so loading needs
    little more memory than the weights themselves.

    Args:
        source: where they come from.
        dtype: of every tensor taken.
        device: of every tensor taken.
        file: the model as the operator knows it, for messages.
        progress: told the bytes of each tensor taken, in its final dtype (`byte_bar(...).update` fits).
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        file: str,
        progress: Callable[[int], object] = _unseen,
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._file = file
        self._progress = progress
        self._names = source.names()
        self._left = set(self._names)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name, taken or not."""
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor of exactly this shape, contiguous, in the binder's dtype and on its device.

        Raises:
            ModelFileError: it is missing, has another shape, was taken before, or cannot be read.
        """
        self._claim(name, shape)
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._fill(name, out)
        return out

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """Several tensors stacked along their first dimension: `[N1, K], [N2, K], ...` give `[N1 + N2 + ..., K]`.

        Each part is read into its place; there is no second copy.

        Raises:
            ModelFileError: as for `take`, for any of the parts.
            ValueError: there are no parts, or they differ in more than the first dimension.
        """
        tails = {shape[1:] for _, shape in parts}
        if len(tails) != 1 or any(not shape for _, shape in parts):
            raise ValueError(f"parts to fuse must agree in all dimensions but the first, got {parts}")
        for name, shape in parts:
            self._claim(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *tails.pop()), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in parts:
            self._fill(name, out[start : start + shape[0]])
            start += shape[0]
        return out

    def ignore(self, name: str) -> None:
        """Say that the model does not need a tensor (a buffer it computes itself); no error if there is none."""
        self._left.discard(name)

    def finish(self) -> None:
        """Check that every tensor of the checkpoint was taken or ignored.

        Raises:
            ModelFileError: some are left over, so this is not the model that the settings describe.
        """
        if not self._left:
            return
        some = ", ".join(sorted(self._left)[:_NAMED_LEFTOVERS])
        more = len(self._left) - _NAMED_LEFTOVERS
        listed = f"{some} and {more} more" if more > 0 else some
        raise ModelFileError(
            self._file, "", f"{len(self._left)} tensors of the checkpoint have no place in the model: {listed}"
        )

    def _claim(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ModelFileError(self._file, name, f"the model needs this tensor, of shape {shape}; there is none")
        if name not in self._left:
            raise ModelFileError(self._file, name, "is taken twice")
        found = self._source.shape(name)
        if found != shape:
            raise ModelFileError(self._file, name, f"has shape {found}, but the model needs {shape}")
        self._left.discard(name)

    def _fill(self, name: str, out: torch.Tensor) -> None:
        self._source.read_into(name, out)
        self._progress(out.numel() * out.element_size())
