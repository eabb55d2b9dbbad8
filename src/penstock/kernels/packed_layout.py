"""Memory layout of packed weights, in torch: the reference for the compiled packing, and the fallback without it.

Decides the order of bytes, and nothing about products. A packed weight is a sequence of panels of 16 outputs, the last
one padded. Within a panel, short runs of inputs are interleaved across the 16 outputs, so that the compiled kernels
read it from front to back. The layouts are drawn in `native/layout.h` and at the top of `native/linear_*.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "F8_UNIT",
    "GROUP",
    "f8_row_bytes",
    "pack_bf16",
    "pack_f32",
    "pack_f8",
    "pack_q4",
    "pack_q8",
    "unpack_bf16",
    "unpack_f32",
    "unpack_f8",
    "unpack_q4",
    "unpack_q8",
]

GROUP = 32
"""Inputs that share a scale in q4 and q8."""

F8_UNIT = 128
"""Inputs that share a scale in f8."""

_PANEL, _LINE = 16, 64


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _filled(numbers: Tensor, unit: int, value: int = 0) -> Tensor:
    """`[N, C]` padded to `[P, 16, C']`: whole panels, and a multiple of `unit` columns."""
    outputs, columns = numbers.shape
    extra = (0, _up(columns, unit) - columns, 0, _up(outputs, _PANEL) - outputs)
    return pad(numbers, extra, value=value).view(-1, _PANEL, _up(columns, unit))


def _bytes(numbers: Tensor) -> Tensor:
    """View the last dimension as bytes."""
    return numbers.contiguous().view(torch.uint8)


def _rows(panels: Tensor, outputs: int, inputs: int) -> Tensor:
    """`[P, 16, ...]` to `[N, K]`, without the padding."""
    return panels.flatten(0, 1).flatten(1)[:outputs, :inputs].contiguous()


def pack_bf16(weight: Tensor) -> Tensor:
    """Bfloat16 `[N, K]` to bytes."""
    pairs = _filled(weight, 2).unflatten(2, (-1, 2))  # [P, 16, K/2, 2]
    return _bytes(pairs.permute(0, 2, 1, 3)).flatten()


def unpack_bf16(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The numbers as float32 `[N, K]`."""
    pairs = packed.view(torch.bfloat16).view(-1, _up(inputs, 2) // 2, _PANEL, 2)
    return _rows(pairs.permute(0, 2, 1, 3), outputs, inputs).float()


def pack_f32(weight: Tensor) -> Tensor:
    """Float32 `[N, K]` to bytes."""
    return _bytes(_filled(weight, 1).transpose(1, 2)).flatten()


def unpack_f32(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The numbers `[N, K]`."""
    return _rows(packed.view(torch.float32).view(-1, inputs, _PANEL).transpose(1, 2), outputs, inputs)


def _lanes_last(groups: Tensor) -> Tensor:
    """Float16 `[N, G]` to bytes `[P, G, 32]`."""
    return _bytes(_filled(groups, 1).transpose(1, 2))


def _halves(stored: Tensor) -> Tensor:
    """The inverse of `_lanes_last`: bytes `[P, G, 32]` to float32 `[P, 16, G, 1]`."""
    return stored.contiguous().view(torch.float16).float().transpose(1, 2)[..., None]


def pack_q4(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Pack codes from 0 to 15, uint8 `[N, G * 32]`, and scales and minima, float16 `[N, G]` each, to bytes."""
    runs = _filled(codes, GROUP).unflatten(2, (-1, 4, 2, 4))  # [P, 16, G, 4, 2, 4]: runs of 8, as two halves of 4
    both = (runs[..., 0, :] | runs[..., 1, :] << 4).permute(0, 2, 3, 1, 4)  # [P, G, 4, 16, 4]
    return torch.cat((_lanes_last(scales), _lanes_last(minima), both.flatten(2)), dim=2).flatten()


def unpack_q4(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The numbers as float32 `[N, K]`."""
    groups = packed.view(-1, _up(inputs, GROUP) // GROUP, 320)  # [P, G, 320]
    both = groups[:, :, 64:].unflatten(2, (4, _PANEL, 4)).permute(0, 3, 1, 2, 4)  # [P, 16, G, 4, 4]
    codes = torch.stack((both & 15, both >> 4), dim=4).flatten(3).float()  # [P, 16, G, 32]
    return _rows(codes * _halves(groups[:, :, :32]) + _halves(groups[:, :, 32:64]), outputs, inputs)


def pack_q8(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack int8 codes `[N, G * 32]` and float16 scales `[N, G]` to bytes."""
    raised = _filled(codes.view(torch.uint8) ^ 128, GROUP).unflatten(2, (-1, 8, 4))  # [P, 16, G, 8, 4]
    return torch.cat((_lanes_last(scales), raised.permute(0, 2, 3, 1, 4).flatten(2)), dim=2).flatten()


def unpack_q8(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The numbers as float32 `[N, K]`."""
    groups = packed.view(-1, _up(inputs, GROUP) // GROUP, 544)  # [P, G, 544]
    codes = groups[:, :, 32:].unflatten(2, (8, _PANEL, 4)).permute(0, 3, 1, 2, 4).flatten(3).float() - 128
    return _rows(codes * _halves(groups[:, :, :32]), outputs, inputs)


def f8_row_bytes(inputs: int) -> int:
    """Bytes of an FP8 row before packing: a float32 scale for each 128 inputs, then the codes."""
    return 4 * (_up(inputs, F8_UNIT) // F8_UNIT) + inputs


def pack_f8(rows: Tensor, inputs: int) -> Tensor:
    """Pack rows of scales and E4M3 codes, uint8 `[N, f8_row_bytes(K)]`, to bytes."""
    units, lines = _up(inputs, F8_UNIT) // F8_UNIT, _up(inputs, 4) // 4
    scales = _filled(rows[:, : 4 * units], 4).unflatten(2, (units, 4)).transpose(1, 2).flatten(2)  # [P, U, 64]
    codes = _filled(rows[:, 4 * units :], F8_UNIT).unflatten(2, (-1, 2, 2)).unflatten(1, (4, 4))
    laid = codes.permute(0, 3, 1, 4, 2, 5).reshape(len(codes), units, -1)  # from [P, 4, 4, lines, 2, 2]
    return torch.cat((scales, laid), dim=2).flatten(1)[:, : _LINE * (units + lines)].flatten()


def unpack_f8(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The numbers as float32 `[N, K]`: each is the product of its scale and code, rounded once."""
    units, lines = _up(inputs, F8_UNIT) // F8_UNIT, _up(inputs, 4) // 4
    panels = packed.view(-1, _LINE * (units + lines))
    whole = pad(panels, (0, _LINE * (units * F8_UNIT // 4 - lines))).view(len(panels), units, -1)  # [P, U, 33 * 64]
    scales = whole[:, :, :_LINE].contiguous().view(torch.float32).transpose(1, 2)  # [P, 16, U]
    codes = whole[:, :, _LINE:].reshape(len(panels), -1, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5)
    numbers = codes.reshape(len(panels), _PANEL, units, F8_UNIT).view(torch.float8_e4m3fn).float()
    return _rows(numbers * scales[..., None], outputs, units * F8_UNIT)[:, :inputs].contiguous()
