"""Packs the parts of quantised blocks into weights in block forms, code for code and scale for scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from penstock.kernels import native, packed_blocks
from penstock.kernels.block_parts import BlockParts
from penstock.kernels.native import Cpu
from penstock.kernels.packed_blocks import BLOCK_FORMS, BlockForm, Fields, fields_of
from penstock.kernels.packed_linear import PackedKind, PackedWeight
from penstock.kernels.packed_weight import MAX_INPUTS, memory_of, room_for
from penstock.kernels.weight_memory import WeightMemory

__all__ = ["pack_parts"]


def pack_parts(
    kind: PackedKind,
    pieces: Iterable[BlockParts],
    outputs: int,
    inputs: int,
    memory: WeightMemory | None = None,
    cpu: Cpu | None = None,
) -> PackedWeight:
    """Pack the parts of quantised blocks into a block form, code for code and scale for scale.

    Args:
        kind: the form; its units must be as long as the blocks.
        pieces: consecutive groups of rows; each but the last has a multiple of 16 rows.
        outputs: number of rows.
        inputs: numbers in a row.
        memory: where to put the packed bytes, or None for memory of their own.
        cpu: provides the packing threads; None for the calling thread alone.

    Raises:
        ValueError: the form cannot hold the parts, or they do not fill the shape.
    """
    form = BLOCK_FORMS[kind.name]
    if outputs < 1 or not 1 <= inputs <= MAX_INPUTS or inputs % form.inputs:
        raise ValueError(
            f"a weight must have outputs, and inputs in units of {form.inputs} up to {MAX_INPUTS};"
            f" got {outputs} x {inputs}"
        )
    data = _block_room(kind, form, outputs, inputs, memory)
    row, place, pack = 0, 0, _pack_fields(kind, form, cpu)
    for parts in pieces:
        rows = parts.codes.numel() // inputs
        size = -(-rows // 16) * (len(data) // -(-outputs // 16))
        pack(fields_of(form, parts, rows), data[place : place + size])
        row, place = row + rows, place + size
    if row != outputs:
        raise ValueError(f"there are blocks of {row} rows, not of {outputs}")
    return PackedWeight(kind, outputs, inputs, data)


def _block_room(kind: PackedKind, form: BlockForm, outputs: int, inputs: int, memory: WeightMemory | None) -> Tensor:
    if native.module is not None:
        return room_for(kind, outputs, inputs, memory)
    count = -(-outputs // 16) * form.panel_bytes(inputs)
    return torch.empty(count, dtype=torch.uint8) if memory is None else memory.take(count)


def _pack_fields(kind: PackedKind, form: BlockForm, cpu: Cpu | None) -> Callable[[Fields, Tensor], None]:
    """Choose the function that packs some rows into the bytes of their panels."""
    if native.module is None:

        def pack_in_torch(fields: Fields, to: Tensor) -> None:
            to.copy_(packed_blocks.pack(form, fields))

        return pack_in_torch
    compiled = cpu or native.open_cpu()

    def pack(fields: Fields, to: Tensor) -> None:
        compiled.pack_codes(
            kind=kind,
            outputs=fields.codes.shape[0],
            inputs=fields.codes.shape[1],
            codes=memory_of(fields.codes.view(-1)),
            records=memory_of(fields.records.view(-1)),
            table=None if fields.table is None else memory_of(fields.table),
            to=memory_of(to),
        )

    return pack
