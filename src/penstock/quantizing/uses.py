"""Finds the matrices of a checkpoint that can become integers, by how the model takes them.

Only `nn.Linear` modules can. Embeddings, heads, routers, experts that share a tensor, and matrices stored inputs first
stay plain numbers; so does any matrix fused with one of them, since engines multiply such matrices as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock import models
from penstock.kernels.experts import StackedWeight
from penstock.kernels.linear import Weight
from penstock.quantizing.blank import Blank
from penstock.weights.bind import Binder
from penstock.weights.compressed_encode import IntegerForm
from penstock.weights.files import ModelFiles
from penstock.weights.source import TensorSource

__all__ = ["projections"]

_EXPERT = "{expert}"
_FEWEST_ROWS = 128
"""Minimum rows of matrices that are multiplied as one; smaller ones are gates, whose errors cost more than their bytes
save."""


class _UseBinder(Binder):
    """Records how each tensor is taken; owned by one call of `projections`."""

    def __init__(self, source: TensorSource, file: str) -> None:
        super().__init__(Blank(source), torch.bfloat16, "cpu", file)
        self.joined: list[Sequence[tuple[str, tuple[int, int]]]] = []
        self.whole: dict[str, str] = {}
        """The stored matrix of each part, by the part's name."""

    def take_linear(self, parts: Sequence[tuple[str, tuple[int, int]]], *, transposed: bool = False) -> Weight:
        """See `WeightLoader.take_linear`."""
        if not transposed:
            self.joined.append(parts)
        return super().take_linear(parts, transposed=transposed)

    def take_stack(
        self,
        experts: int,
        parts: Sequence[tuple[str, tuple[int, int]]],
        *,
        transposed: bool = False,
        alternates: bool = False,
    ) -> StackedWeight:
        """See `WeightLoader.take_stack`."""
        if not transposed and not alternates and all(_EXPERT in name for name, _ in parts):
            for expert in range(experts):
                self.joined.append([(name.replace(_EXPERT, str(expert)), shape) for name, shape in parts])
        return super().take_stack(experts, parts, transposed=transposed, alternates=alternates)

    def split_rows(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """See `WeightLoader.split_rows`."""
        self.whole |= dict.fromkeys(parts, name)
        super().split_rows(name, shape, parts)


def projections(files: ModelFiles, form: IntegerForm) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of the matrices that become integers, and the name prefixes of parts that are not computed.

    Raises:
        ModelFileError: the model cannot be built.
    """
    binder = _UseBinder(files.source, str(files.path))
    models.load(files.config, binder, str(files.path), None)
    fitting = {
        name
        for parts in binder.joined
        if all(name.endswith(".weight") and form.fits(shape[1]) for name, shape in parts)
        and sum(shape[0] for _, shape in parts) >= _FEWEST_ROWS
        for name, _ in parts
    }
    found = {name for name in fitting if name not in binder.whole}
    parted = {name: [part for part, whole in binder.whole.items() if whole == name] for name in binder.whole.values()}
    found |= {name for name, parts in parted.items() if fitting.issuperset(parts)}
    return frozenset(found), tuple(binder.left_out)
