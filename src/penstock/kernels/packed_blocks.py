"""The block forms: memory layout of codes and of the scales of their shares, in torch.

Decides the order of bytes (`native/layout.h` draws it, `native/isa_blocks.h` lists the forms), and what a field holds.
Nothing is rounded: a form takes the parts of blocks as they are, or rejects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.block_parts import BlockParts

__all__ = ["BLOCK_FORMS", "BlockForm", "Fields", "fields_of", "pack", "unpack"]

_PANEL, _GROUP, _LINE = 16, 32, 64
_STEPS = 16


@dataclass(frozen=True, slots=True)
class BlockForm:
    """One of the forms.

    Attributes:
        inputs: inputs per unit, which share a top-level scale.
        share: inputs per share, the part of a unit with its own sub-scale.
        low_bits: low bits of a code, stored in one plane.
        high_bits: remaining high bits of a code, stored in another plane.
        bias: code minus number, for forms without minima.
        minima: whether shares have minima.
        signed: whether scales of shares are signed.
        exponents: whether the scale is E8M0 rather than float16.
        zeros: whether each unit has its own code that stands for zero.
        table: whether codes are indices into a table of 16 numbers.
    """

    inputs: int
    share: int
    low_bits: int
    high_bits: int = 0
    bias: int = 0
    minima: bool = False
    signed: bool = False
    exponents: bool = False
    zeros: bool = False
    table: bool = False

    @property
    def shares(self) -> int:
        """Shares per unit; 0 for a form with a single level of scales."""
        return 0 if self.share == self.inputs else self.inputs // self.share

    @property
    def halves(self) -> int:
        """Number of float16 fields per output in a unit."""
        return 0 if self.exponents else 1 + self.minima

    @property
    def bytes(self) -> int:
        """Number of one-byte fields per output in a unit."""
        return 1 if self.exponents or self.zeros else self.shares * (1 + self.minima)

    @property
    def header(self) -> int:
        """Bytes of a panel's fields in a unit, padding included."""
        fields = 32 * self.halves + 16 * self.bytes
        return fields if self.inputs == _GROUP else -(-fields // _LINE) * _LINE

    @property
    def group_bytes(self) -> int:
        """Bytes of a panel's codes for 32 inputs."""
        return _LINE * (self.low_bits + self.high_bits)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a panel per unit."""
        return self.header + self.inputs // _GROUP * self.group_bytes

    def panel_bytes(self, inputs: int) -> int:
        """Bytes of a panel of 16 outputs."""
        return (_LINE if self.table else 0) + inputs // self.inputs * self.unit_bytes


BLOCK_FORMS: Mapping[str, BlockForm] = {
    "Q5": BlockForm(32, 32, 4, 1, minima=True),
    "Q2K": BlockForm(256, 16, 2, minima=True),
    "Q3K": BlockForm(256, 16, 2, 1, bias=4, signed=True),
    "Q4K": BlockForm(256, 32, 4, minima=True),
    "Q5K": BlockForm(256, 32, 4, 1, minima=True),
    "Q6K": BlockForm(256, 16, 4, 2, bias=32, signed=True),
    "NL4": BlockForm(32, 32, 4, table=True),
    "MX4": BlockForm(32, 32, 4, exponents=True, table=True),
    "NL4K": BlockForm(256, 32, 4, signed=True, table=True),
    "NL4K16": BlockForm(256, 16, 4, signed=True, table=True),
    "Z4": BlockForm(32, 32, 4, zeros=True),
    "Z4W": BlockForm(128, 128, 4, zeros=True),
}
"""Keyed by the name of the `PackedKind`."""


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """The data that a form stores for N outputs.

    Attributes:
        codes: uint8 `[N, K]`.
        records: uint8 `[N, units, bytes]`: for each unit, the float16 fields, then the one-byte fields.
        table: uint8 `[64]`, the first line of each panel; or None.
    """

    codes: Tensor
    records: Tensor
    table: Tensor | None


def fields_of(form: BlockForm, parts: BlockParts, outputs: int) -> Fields:
    """Convert the parts of blocks, row by row, to the fields of a form.

    Raises:
        ValueError: the form cannot hold them.
    """
    halves, short = [] if form.exponents else [parts.scale], [parts.scale] if form.exponents else []
    if form.zeros and parts.zero is not None:
        short.append(parts.zero)
    if form.minima:
        halves.append(_minimum(parts))
    if form.shares:
        short.append(_sub_scales(form, parts))
        short += [parts.sub_minima] if form.minima and parts.sub_minima is not None else []
    fields = torch.cat(
        [*(each.view(torch.uint8) for each in halves), *(each.view(torch.uint8) for each in short)], dim=1
    )
    blocks = len(parts.codes)
    units = blocks * parts.codes.shape[1] // form.inputs
    assert units == blocks, "a unit is a block"
    codes = parts.codes.reshape(outputs, -1).contiguous()
    return Fields(codes, fields.view(outputs, units // outputs, -1).contiguous(), _table(parts) if form.table else None)


def _minimum(parts: BlockParts) -> Tensor:
    if parts.minimum is not None:
        return parts.minimum
    minimum = parts.scale * -float(parts.bias)
    if not torch.isfinite(minimum).all():
        raise ValueError(f"a block's scale is not a number below {65536 // parts.bias}")
    return minimum


def _sub_scales(form: BlockForm, parts: BlockParts) -> Tensor:
    if parts.sub_scales is None:
        return torch.ones(len(parts.codes), form.shares, dtype=torch.uint8)
    return parts.sub_scales


def _table(parts: BlockParts) -> Tensor:
    """A panel's first line: the int8 value of each code, then the float32 unit by which the values are multiplied."""
    steps = parts.values or [code - parts.bias for code in range(_STEPS)]
    line = torch.zeros(_LINE, dtype=torch.uint8)
    line[:_STEPS] = torch.tensor(steps, dtype=torch.int8).view(torch.uint8)
    line[_STEPS : _STEPS + 4] = torch.tensor([parts.unit], dtype=torch.float32).view(torch.uint8)
    return line


def pack(form: BlockForm, fields: Fields) -> Tensor:
    """Pack the fields of some outputs to bytes."""
    outputs, inputs = fields.codes.shape
    panels, units = -(-outputs // _PANEL), inputs // form.inputs
    codes = torch.zeros(panels * _PANEL, inputs, dtype=torch.uint8)
    codes[:outputs] = fields.codes
    groups = codes.view(panels, _PANEL, units, form.inputs // _GROUP, _GROUP)
    planes = [_to_plane(groups, 0, form.low_bits)]
    if form.high_bits:
        planes.append(_to_plane(groups, form.low_bits, form.high_bits))
    records = torch.zeros(panels * _PANEL, units, fields.records.shape[2], dtype=torch.uint8)
    records[:outputs] = fields.records
    records = records.view(panels, _PANEL, units, -1)
    halves, short = records[..., : 2 * form.halves].unflatten(3, (-1, 2)), records[..., 2 * form.halves :]
    header = torch.zeros(panels, units, form.header, dtype=torch.uint8)
    both = (halves.permute(0, 2, 3, 1, 4).flatten(2), short.permute(0, 2, 3, 1).flatten(2))
    laid = torch.cat(both, dim=2)
    header[:, :, : laid.shape[2]] = laid
    packed = torch.cat((header, torch.cat(planes, dim=3).flatten(2)), dim=2).flatten(1)
    if fields.table is not None:
        packed = torch.cat((fields.table.expand(panels, -1), packed), dim=1)
    return packed.flatten()


def _to_plane(groups: Tensor, start: int, bits: int) -> Tensor:
    """Extract `bits` bits, from `start` on, of codes `[P, 16, U, G, 32]` to bytes `[P, U, G, 64 * bits]`."""
    quads = 8 // bits
    fields = (groups >> start & (1 << bits) - 1).unflatten(4, (bits, quads, 4))  # [P, 16, U, G, lines, quads, 4]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    joined = (fields << shifts).sum(dim=5, dtype=torch.uint8)  # [P, 16, U, G, lines, 4]
    return joined.permute(0, 2, 3, 4, 1, 5).flatten(3)


def _from_plane(lines: Tensor, bits: int) -> Tensor:
    """The inverse of `_to_plane`: `[P, U, G, 64 * bits]` to `[P, 16, U, G, 32]`."""
    joined = lines.unflatten(3, (bits, _PANEL, 4)).permute(0, 4, 1, 2, 3, 5)[..., None, :]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return (joined >> shifts & (1 << bits) - 1).flatten(4)


def unpack(form: BlockForm, packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The numbers as float32 `[N, K]`."""
    units = inputs // form.inputs
    panels = packed.view(-(-outputs // _PANEL), -1)
    table = panels[0, :_LINE] if form.table else None
    laid = panels[:, 0 if table is None else _LINE :].unflatten(1, (units, form.unit_bytes))
    groups = laid[:, :, form.header :].unflatten(2, (-1, form.group_bytes))
    codes = _from_plane(groups[..., : _LINE * form.low_bits], form.low_bits)
    if form.high_bits:
        codes = codes | _from_plane(groups[..., _LINE * form.low_bits :], form.high_bits) << form.low_bits
    parts = _parts(form, codes.reshape(-1, form.inputs), laid, table)
    return parts.numbers().view(-1, inputs)[:outputs].contiguous()


def _parts(form: BlockForm, codes: Tensor, laid: Tensor, table: Tensor | None) -> BlockParts:
    """The parts of all units, output by output."""
    halves = laid[:, :, : 32 * form.halves].unflatten(2, (form.halves, _PANEL, 2))
    half = halves.permute(2, 0, 3, 1, 4).reshape(form.halves, len(codes), 2).contiguous().view(torch.float16)
    short = laid[:, :, 32 * form.halves :][:, :, : 16 * form.bytes].unflatten(2, (form.bytes, _PANEL))
    byte = short.permute(0, 3, 1, 2).reshape(len(codes), form.bytes)
    sub_scales = byte[:, : form.shares]
    return BlockParts(
        codes,
        byte if form.exponents else half[0],
        values=None if table is None else tuple(table[:_STEPS].view(torch.int8).tolist()),
        bias=form.bias,
        sub_scales=None if not form.shares else sub_scales.view(torch.int8) if form.signed else sub_scales,
        zero=byte if form.zeros else None,
        minimum=half[1] if form.minima else None,
        sub_minima=byte[:, form.shares :] if form.minima and form.shares else None,
        unit=1.0 if table is None else table[_STEPS : _STEPS + 4].clone().view(torch.float32).item(),
    )
