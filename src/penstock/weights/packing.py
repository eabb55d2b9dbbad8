"""The weight formats of projections and embeddings, and how weights are packed.

One format, chosen by the operator, applies to all projections of a model. Knows no layers and no files: a weight is a
matrix of numbers, or the quantised blocks of a stored matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeVar

import torch

from penstock.contract.errors import ModelFileError
from penstock.kernels.block_parts import BlockParts
from penstock.kernels.native import Cpu
from penstock.kernels.packed_parts import pack_parts
from penstock.kernels.packed_stack import PackedStack, pack_stack
from penstock.kernels.packed_weight import (
    PackedWeight,
    block_kind,
    pack_bf16,
    pack_f32,
    pack_fp8,
    pack_q4_0,
    pack_q4_1,
    pack_q8_0,
    quantize_int4,
    quantize_int8,
)
from penstock.kernels.weight_memory import WeightMemory
from penstock.weights.gguf_blocks import block_bytes, block_parts
from penstock.weights.integer_blocks import INTEGER_BLOCKS, integer_parts
from penstock.weights.source import StoredBlocks

__all__ = ["BFLOAT16_KINDS", "PIECE_BYTES", "Packer", "WeightFormat", "pack_blocks"]


class WeightFormat(StrEnum):
    """How the weights of projections and embeddings are kept in memory."""

    DENSE = "dense"
    """Plain tensors in the activations' dtype, for torch's kernels."""
    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    """One scale per 32 inputs."""
    INT4 = "int4"
    """One scale and minimum per 32 inputs; embedding tables, and heads tied to them, as in INT8."""
    STORED = "stored"
    """As in the file: quantised blocks are kept, other tensors become bf16, or f32 in a float32 model."""


def _pack_stored(numbers: torch.Tensor, memory: WeightMemory | None, cpu: Cpu | None) -> PackedWeight:
    """Pack numbers in the dtype that they were read in."""
    return (pack_f32 if numbers.dtype == torch.float32 else pack_bf16)(numbers, memory, cpu)


_WEIGHTS: dict[WeightFormat, Callable[[torch.Tensor, WeightMemory | None, Cpu | None], PackedWeight]] = {
    WeightFormat.F32: pack_f32,
    WeightFormat.BF16: pack_bf16,
    WeightFormat.STORED: _pack_stored,
    WeightFormat.INT8: quantize_int8,
    WeightFormat.INT4: quantize_int4,
}
_BLOCKS = {"Q4_0": pack_q4_0, "Q4_1": pack_q4_1, "Q8_0": pack_q8_0, "INT8": pack_q8_0, "FP8": pack_fp8}
BFLOAT16_KINDS = frozenset({"FP8"})
"""Block kinds that are multiplied by bfloat16 activations; a float32 model converts them to plain numbers."""

_PIECE_NUMBERS = 1 << 22
"""Elements split into block parts at once."""

PIECE_BYTES = 32 << 20
"""Approximate memory for splitting one piece."""


def pack_blocks(
    blocks: StoredBlocks, outputs: int, inputs: int, memory: WeightMemory | None = None, cpu: Cpu | None = None
) -> PackedWeight:
    """Pack a weight `[N, K]` from stored blocks, without changing any number.

    Raises:
        ValueError: the blocks do not fill that shape, or have scales that the packed format cannot hold.
    """
    if blocks.kind in _BLOCKS:
        return _BLOCKS[blocks.kind](blocks.data, outputs, inputs, memory, cpu)
    return pack_parts(block_kind(blocks.kind), _pieces(blocks, inputs), outputs, inputs, memory, cpu)


def _pieces(blocks: StoredBlocks, inputs: int) -> Iterator[BlockParts]:
    rows = max(16, _PIECE_NUMBERS // inputs // 16 * 16)
    integers = INTEGER_BLOCKS.get(blocks.kind)
    size = integers.bytes if integers else block_bytes(blocks.kind)
    for start in range(0, len(blocks.data), rows):
        piece = blocks.data[start : start + rows].reshape(-1, size)
        yield integer_parts(piece) if integers else block_parts(piece, blocks.kind)


_Packed = TypeVar("_Packed", PackedWeight, PackedStack)


class Packer:
    """Packs the weights of one model, in one format. Owned by its binder; packed weights may outlive it.

    Args:
        weight_format: the format.
        file: where numbers come from, for messages.
        cpu: kernels whose threads pack; None to pack on the calling thread.

    Attributes:
        packing_bytes: peak temporary memory of packing any one weight; counted only by a `PlannedPacker`.
    """

    def __init__(self, weight_format: WeightFormat, file: str, cpu: Cpu | None = None) -> None:
        self.weight_format = weight_format
        self.packing_bytes = 0
        self._cpu = cpu
        self._file = file
        self._memory = WeightMemory()

    def weight(self, numbers: torch.Tensor, name: str) -> PackedWeight:
        """Pack a projection's weight `[N, K]`, float32 or bfloat16.

        Raises:
            ModelFileError: it holds numbers that this format cannot represent.
        """
        return self._guarded(lambda: _WEIGHTS[self.weight_format](numbers, self._memory, self._cpu), name)

    def table(self, numbers: torch.Tensor, name: str) -> PackedWeight:
        """Pack an embedding table `[V, H]`; raises as `weight` does."""
        weight_format = WeightFormat.INT8 if self.weight_format is WeightFormat.INT4 else self.weight_format
        return self._guarded(lambda: _WEIGHTS[weight_format](numbers, self._memory, self._cpu), name)

    def blocks(self, blocks: StoredBlocks, outputs: int, inputs: int, name: str) -> PackedWeight:
        """Pack a weight `[N, K]` from stored blocks, without changing any number; raises as `weight` does."""
        return self._guarded(lambda: pack_blocks(blocks, outputs, inputs, self._memory, self._cpu), name)

    def plain(self, numbers: torch.Tensor, name: str) -> PackedWeight:
        """Pack a weight `[N, K]` unquantised, in the dtype that it was read in."""
        return self._guarded(lambda: _pack_stored(numbers, self._memory, self._cpu), name)

    def stack(
        self,
        experts: int,
        weight_of: Callable[[int], torch.Tensor | StoredBlocks],
        outputs: int,
        inputs: int,
        name: str,
    ) -> PackedStack:
        """Pack the weights `[N, K]` of a layer's experts, reading one expert at a time; raises as `weight` does.

        Args:
            experts: number of experts.
            weight_of: reads an expert's numbers, float32 or bfloat16, or its blocks.
            outputs: N.
            inputs: K.
            name: name of the first tensor, for messages.
        """

        def pack(expert: int, memory: WeightMemory | None) -> PackedWeight:
            weight = weight_of(expert)
            if isinstance(weight, StoredBlocks):
                return pack_blocks(weight, outputs, inputs, memory, self._cpu)
            return _WEIGHTS[self.weight_format](weight, memory, self._cpu)

        return self._guarded(lambda: pack_stack(experts, pack, self._memory), name)

    def _guarded(self, pack: Callable[[], _Packed], name: str) -> _Packed:
        try:
            return pack()
        except ValueError as error:
            raise ModelFileError(self._file, name, str(error)) from error
