"""Packing for weights that are planned and not loaded: the same formats and sizes, without allocating memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.kernels import native
from penstock.kernels.packed_stack import PackedStack
from penstock.kernels.packed_weight import QUANTISED_AT_ONCE, PackedKind, PackedWeight, block_kind
from penstock.kernels.weight_memory import whole_lines
from penstock.weights.headers_only import META
from penstock.weights.packing import PIECE_BYTES, Packer, WeightFormat
from penstock.weights.source import StoredBlocks

__all__ = ["PlannedPacker"]

_KINDS = {
    WeightFormat.F32: PackedKind.F32,
    WeightFormat.BF16: PackedKind.BF16,
    WeightFormat.INT8: PackedKind.Q8,
    WeightFormat.INT4: PackedKind.Q4,
}


_QUANTISED = frozenset({PackedKind.Q8, PackedKind.Q4})


class PlannedPacker(Packer):
    """A `Packer` of tensors on torch's `meta` device."""

    def weight(self, numbers: torch.Tensor, name: str) -> PackedWeight:  # noqa: ARG002 - nothing can fail
        """See `Packer.weight`."""
        return self._from_numbers(self._kind(numbers), numbers)

    def table(self, numbers: torch.Tensor, name: str) -> PackedWeight:
        """See `Packer.table`."""
        if self.weight_format is WeightFormat.INT4:
            return self._from_numbers(PackedKind.Q8, numbers)
        return self.weight(numbers, name)

    def blocks(self, blocks: StoredBlocks, outputs: int, inputs: int, name: str) -> PackedWeight:  # noqa: ARG002
        """See `Packer.blocks`."""
        weight = _planned(block_kind(blocks.kind), outputs, inputs)
        self._count(PIECE_BYTES + 2 * weight.nbytes)  # the parts of a fused weight, and their concatenation
        return weight

    def plain(self, numbers: torch.Tensor, name: str) -> PackedWeight:  # noqa: ARG002 - nothing can fail
        """See `Packer.plain`."""
        return self._from_numbers(_plain_kind(numbers), numbers)

    def stack(
        self,
        experts: int,
        weight_of: Callable[[int], torch.Tensor | StoredBlocks],
        outputs: int,
        inputs: int,
        name: str,  # noqa: ARG002 - nothing can fail
    ) -> PackedStack:
        """See `Packer.stack`; all experts have the kind and size of the first."""
        first = weight_of(0)
        kind = block_kind(first.kind) if isinstance(first, StoredBlocks) else self._kind(first)
        each = native.required().packed_bytes(kind, outputs, inputs)
        stride = whole_lines(each)
        data = torch.empty(experts * stride, dtype=torch.uint8, device=META)
        self._count(PIECE_BYTES + 2 * each if isinstance(first, StoredBlocks) else _beside(kind, first))
        return PackedStack(kind, experts, outputs, inputs, data, stride, each)

    def _from_numbers(self, kind: PackedKind, numbers: torch.Tensor) -> PackedWeight:
        self._count(_beside(kind, numbers))
        return _planned(kind, *numbers.shape)

    def _count(self, beside: int) -> None:
        self.packing_bytes = max(self.packing_bytes, beside)

    def _kind(self, numbers: torch.Tensor) -> PackedKind:
        kind = _KINDS.get(self.weight_format)  # None for STORED: a tensor without blocks is packed plain
        return _plain_kind(numbers) if kind is None else kind


def _plain_kind(numbers: torch.Tensor) -> PackedKind:
    return PackedKind.F32 if numbers.dtype == torch.float32 else PackedKind.BF16


def _beside(kind: PackedKind, numbers: torch.Tensor) -> int:
    """Bytes needed while packing besides the result: the numbers, and any blocks that they are first quantised to."""
    blocks = native.required().packed_bytes(kind, *numbers.shape) + QUANTISED_AT_ONCE if kind in _QUANTISED else 0
    return numbers.nbytes + blocks


def _planned(kind: PackedKind, outputs: int, inputs: int) -> PackedWeight:
    count = native.required().packed_bytes(kind, outputs, inputs)
    return PackedWeight(kind, outputs, inputs, torch.empty(count, dtype=torch.uint8, device=META))
