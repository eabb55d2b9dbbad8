"""The packed weights of a layer's experts: one kind in one piece of memory, or several parts of different kinds."""

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
        data: uint8 `[experts * stride]`; weight `e` begins at `e * stride`, laid out as in a `PackedWeight`.
        stride: bytes from one weight to the next, in whole cache lines.
        weight_bytes: bytes of each weight.
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
        """`[E, N, K]`, the shape of the unpacked numbers."""
        return self.experts, self.outputs, self.inputs

    @property
    def parts(self) -> tuple[PackedStack]:
        """Itself; see `FusedStack`."""
        return (self,)

    @property
    def arithmetic(self) -> str:
        """See `Weight.arithmetic`."""
        return self.kind.arithmetic

    @property
    def nbytes(self) -> int:
        """Memory of all weights."""
        return self.data.nbytes

    def __getitem__(self, expert: int) -> PackedWeight:
        """The weight of one expert; it shares the memory of the stack."""
        data = self.data[expert * self.stride :][: self.weight_bytes]
        return PackedWeight(self.kind, self.outputs, self.inputs, data)


@dataclass(frozen=True, slots=True, eq=False)
class FusedStack:
    """Weights `[E, N1, K], [E, N2, K], ...` packed in different kinds, as one `[E, N1 + N2 + ..., K]`.

    Used where gates and ups are multiplied as one weight but a file stores them in blocks of different kinds, so that
    neither has to be requantised into the other's form.

    Attributes:
        parts: two or more, in the order of outputs.

    Raises:
        ValueError: the parts differ in the number of experts or inputs.
    """

    parts: tuple[PackedStack, ...]

    def __post_init__(self) -> None:
        """Check the parts against each other."""
        if len({(part.experts, part.inputs) for part in self.parts}) != 1:
            raise ValueError(f"parts {[part.shape for part in self.parts]} do not belong together")

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[E, N, K]`, the shape of the unpacked numbers; N is the sum over all parts."""
        experts, _, inputs = self.parts[0].shape
        return experts, sum(part.outputs for part in self.parts), inputs

    @property
    def arithmetic(self) -> str:
        """See `FusedWeight.arithmetic`."""
        return self[0].arithmetic

    @property
    def nbytes(self) -> int:
        """Memory of all parts."""
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, expert: int) -> FusedWeight:
        """The weight of one expert; it shares the memory of the stacks."""
        return FusedWeight(tuple(part[expert] for part in self.parts))


def pack_stack(
    experts: int, pack: Callable[[int, WeightMemory | None], PackedWeight], memory: WeightMemory | None = None
) -> PackedStack:
    """Pack a weight for each expert, one after the other, into one piece of memory.

    Args:
        experts: number of experts.
        pack: packs the weight of an expert into the given memory; all weights must have the same kind and shape.
        memory: where to allocate the piece; None for memory of its own.

    Raises:
        ValueError: there are no experts, or their weights differ in kind or shape.
    """
    if experts < 1:
        raise ValueError(f"experts must be at least 1, not {experts}")
    first = pack(0, None)  # determines the size of each weight
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
