"""The packed weights of a layer's experts: all alike, in one piece of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.packed_linear import PackedKind, PackedWeight
from penstock.kernels.weight_memory import WeightMemory, whole_lines

__all__ = ["PackedStack", "pack_stack"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedStack:
    """Weights `[outputs, inputs]` of the same kind in one piece of memory, one for each expert of a layer.

    Attributes:
        data: uint8 `[experts * stride]`; weight `e` begins at `e * stride` and lies as in a `PackedWeight`.
        stride: bytes from one weight to the next, in whole cache lines.
        weight_bytes: of each weight.
    """

    kind: PackedKind
    experts: int
    outputs: int
    inputs: int
    data: Tensor
    stride: int
    weight_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[E, N, K]` of the numbers."""
        return self.experts, self.outputs, self.inputs

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return self.data.nbytes

    def __getitem__(self, expert: int) -> PackedWeight:
        """One of the weights; it shares the memory of the stack."""
        data = self.data[expert * self.stride :][: self.weight_bytes]
        return PackedWeight(self.kind, self.outputs, self.inputs, data)


def pack_stack(
    experts: int, pack: Callable[[int, WeightMemory | None], PackedWeight], memory: WeightMemory | None = None
) -> PackedStack:
    """Pack a weight for each expert, one after the other, into one piece of memory.

    Args:
        experts: how many.
        pack: packs the weight of an expert, where it is told to; all alike in kind and shape.
        memory: where to take the piece from, or None for memory of its own.

    Raises:
        ValueError: there are no experts, or their weights differ in kind or shape.
    """
    if experts < 1:
        raise ValueError(f"experts must be at least 1, not {experts}")
    first = pack(0, None)  # says how much room one of them takes
    stride = whole_lines(first.nbytes)
    data = torch.empty(experts * stride, dtype=torch.uint8) if memory is None else memory.take(experts * stride)
    data[: first.nbytes] = first.data
    room = WeightMemory(data[stride:])
    for expert in range(1, experts):
        _check_alike(first, pack(expert, room), expert)
    return PackedStack(first.kind, experts, first.outputs, first.inputs, data, stride, first.nbytes)


def _check_alike(first: PackedWeight, other: PackedWeight, expert: int) -> None:
    forms = [(each.kind.name, each.outputs, each.inputs) for each in (first, other)]
    if forms[0] != forms[1]:
        raise ValueError(f"the weight of expert {expert} is {forms[1]}, that of expert 0 is {forms[0]}")
