"""The packed weights of a layer's experts: all alike in one piece of memory, or parts in kinds of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fused_weight import FusedWeight
from penstock.kernels.packed_linear import PackedKind, PackedWeight
from penstock.kernels.weight_memory import WeightMemory, whole_lines

__all__ = ["FusedStack", "PackedStack", "pack_stack"]


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
    def parts(self) -> tuple[PackedStack]:
        """Itself; see `FusedStack`."""
        return (self,)

    @property
    def arithmetic(self) -> str:
        """As for `Weight.arithmetic`."""
        return self.kind.arithmetic

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return self.data.nbytes

    def __getitem__(self, expert: int) -> PackedWeight:
        """One of the weights; it shares the memory of the stack."""
        data = self.data[expert * self.stride :][: self.weight_bytes]
        return PackedWeight(self.kind, self.outputs, self.inputs, data)


@dataclass(frozen=True, slots=True, eq=False)
class FusedStack:
    """Weights `[E, N1, K], [E, N2, K], ...` packed in different kinds, as one `[E, N1 + N2 + ..., K]`.

    It stands where gates and ups are multiplied as one weight and a file has them in blocks of different kinds, so that
    none of them has to be rounded to the form of another.

    Attributes:
        parts: two or more, in the order of outputs.

    Raises:
        ValueError: they are not of the same experts and inputs.
    """

    parts: tuple[PackedStack, ...]

    def __post_init__(self) -> None:
        """Check the parts against each other."""
        if len({(part.experts, part.inputs) for part in self.parts}) != 1:
            raise ValueError(f"parts {[part.shape for part in self.parts]} do not belong together")

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[E, N, K]` of the numbers, N of all parts."""
        experts, _, inputs = self.parts[0].shape
        return experts, sum(part.outputs for part in self.parts), inputs

    @property
    def arithmetic(self) -> str:
        """As for `FusedWeight.arithmetic`."""
        return self[0].arithmetic

    @property
    def nbytes(self) -> int:
        """Memory of all parts."""
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, expert: int) -> FusedWeight:
        """One of the weights; it shares the memory of the stacks."""
        return FusedWeight(tuple(part[expert] for part in self.parts))


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
