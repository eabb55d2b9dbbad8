"""FP8 in safetensors: a matrix `NAME.weight` in E4M3, and its scales per block, per row or for the whole matrix.

Decides how the two fit together. `NAME.weight_scale_inv` (DeepSeek-V3, section 3.3; despite its name a factor) or
`NAME.weight_scale` has one number per block of rows and inputs (blocks at the edges may be partial), per row, or per
matrix. The experts of a layer may be stacked in one tensor, with one tensor of scales. A weight's value is the product
in float32: E4M3 has 4 bits of significand and the scale up to 24, so a narrower type such as bfloat16 rounds it. Where
scales cover whole runs of 128 inputs, or a whole row, codes and scales can be kept separately, as rows of bytes for
`packed_weight.pack_fp8`. A NaN code is an error, because no weight may be NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.kernels.packed_layout import F8_UNIT, f8_row_bytes
from penstock.kernels.packed_weight import MAX_INPUTS
from penstock.weights.integer_matrix import place_numbers
from penstock.weights.quantisation_config import Quantisation
from penstock.weights.quantised_safetensors import QuantisedMatrices, QuantisedMatrix, read_part, read_rows
from penstock.weights.safetensors_files import StoredTensor
from penstock.weights.source import PIECE_ELEMENTS

__all__ = ["find_fp8"]

_CODES = ("F8_E4M3",)
_NAN = 0x7F
"""The code of NaN without its sign bit; E4M3 has no infinities."""
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_ENDINGS = ("_scale_inv", "_scale")
_UNHEEDED = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
"""Suffixes of tensors that say how to round activations, keys and values."""


@dataclass(frozen=True, slots=True)
class _Coded:
    """Where codes and their scales are stored; `block` is the rows and inputs that share a scale."""

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    dtype: str = "FP8"
    """The stored type."""

    @property
    def path(self) -> Path:
        """The file of the codes."""
        return self.codes.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return self.codes.shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.codes.bytes

    @property
    def bytes(self) -> int:
        """Total size of both parts in bytes."""
        return self.codes.bytes + self.scales.bytes

    @property
    def kind(self) -> str:
        """`FP8` where each scale covers whole units of inputs, as the packed format requires; otherwise ""."""
        inputs, width = self.shape[-1], self.block[1]
        return "FP8" if inputs <= MAX_INPUTS and (width % F8_UNIT == 0 or width >= inputs) else ""


@dataclass(frozen=True, slots=True)
class Fp8Matrix(_Coded):
    """Where a matrix is stored."""

    def read_numbers(self, name: str, out: Tensor) -> bool:
        """See `QuantisedMatrix.read_numbers`."""
        scales, rounded = self._scales(name), False
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.block[1], dim=1)[:, : self.shape[1]]
        for start, codes in self._codes(name):
            numbers = _numbers_of_codes().index_select(0, codes.view(-1).int()).view(codes.shape)
            numbers.mul_(scales.index_select(0, self._scale_rows(start, len(codes))))
            rounded |= place_numbers(numbers, out[start : start + len(codes)], self.path, name)
        return rounded

    def read_blocks(self, name: str) -> tuple[Tensor, bool]:
        """See `QuantisedMatrix.read_blocks`: each row is one float32 scale per 128 inputs, then the row's codes."""
        rows, inputs = self.shape
        data = torch.empty(rows, f8_row_bytes(inputs), dtype=torch.uint8)
        units = torch.arange(0, inputs, F8_UNIT) // self.block[1]
        scales = self._scales(name).index_select(1, units)
        for start, codes in self._codes(name):
            of_rows = scales.index_select(0, self._scale_rows(start, len(codes)))
            data[start : start + len(codes)] = torch.cat((of_rows.view(torch.uint8), codes), dim=1)
        return data, False

    def _scales(self, name: str) -> Tensor:
        """The scale of each block, float32."""
        rows, inputs = self.shape
        height, width = self.block
        return read_part(name, self.scales, _SCALES).float().reshape(-(-rows // height), -(-inputs // width))

    def _scale_rows(self, start: int, count: int) -> Tensor:
        """The row of scales for each of `count` matrix rows from `start`."""
        return torch.arange(start, start + count) // self.block[0]

    def _codes(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the codes piece by piece: the index of the first row, and uint8 `[rows, K]`.

        Raises:
            ModelFileError: a code is NaN.
        """
        rows, inputs = self.shape
        step = max(1, PIECE_ELEMENTS // inputs)
        for start in range(0, rows, step):
            codes = read_rows(name, self.codes, start, min(start + step, rows), _CODES).view(torch.uint8)
            if int((codes & _NAN).max()) == _NAN:
                raise ModelFileError(str(self.path), name, "holds NaN (a code 0x7f or 0xff); download the file again")
            yield start, codes


@dataclass(frozen=True, slots=True)
class Fp8Stack(_Coded):
    """Where the matrices `[E, N, K]` of a layer's experts and their scales are stored; all have the same block size."""

    def slice(self, index: int) -> Fp8Matrix:
        """One of the matrices."""
        return Fp8Matrix(self.codes.slice(index), self.scales.slice(index), self.block)

    def read_numbers(self, name: str, out: Tensor) -> bool:
        """See `QuantisedMatrix.read_numbers`."""
        return sum(self.slice(index).read_numbers(name, out[index]) for index in range(self.shape[0])) > 0

    def read_blocks(self, name: str) -> tuple[Tensor, bool]:
        """Never called: blocks are read one matrix at a time."""
        raise ModelFileError(str(self.path), name, "is a stack of matrices, which are read one at a time")


@functools.cache
def _numbers_of_codes() -> Tensor:
    """The value of each of the 256 codes; a look-up takes a sixth of the time of a conversion."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def find_fp8(stored: Mapping[str, StoredTensor], scheme: Quantisation) -> QuantisedMatrices:
    """The matrices of an FP8 checkpoint; hides tensors that concern activations, keys and values.

    Raises:
        ModelFileError: a matrix has no scales, or scales that do not fit it.
    """
    matrices: dict[str, QuantisedMatrix] = {}
    hidden = {name for name in stored if name.endswith(_UNHEEDED)}
    for name, codes in stored.items():
        if codes.dtype not in _CODES:
            continue
        scale = next((name + ending for ending in _ENDINGS if name + ending in stored), None)
        if scale is None:
            raise ModelFileError(str(codes.path), name, f"is in FP8 and has no {name}{_ENDINGS[0]} beside it")
        matrices[name] = _matrix(name, codes, stored[scale], scheme.block)
        hidden |= {name, scale}
    return QuantisedMatrices(matrices, frozenset(hidden))


def _matrix(
    name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> Fp8Matrix | Fp8Stack:
    if len(codes.shape) != 3 or scales.shape[:1] != codes.shape[:1] or not codes.bytes:
        return Fp8Matrix(codes, scales, _block(name, codes, scales, block))
    return Fp8Stack(codes, scales, _block(name, codes.slice(0), scales.slice(0), block))


def _block(name: str, codes: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None) -> tuple[int, int]:
    """The rows and inputs that share a scale."""
    if len(codes.shape) != 2 or not codes.bytes:
        raise ModelFileError(str(codes.path), name, f"has shape {codes.shape} in FP8; only matrices can be read")
    rows, inputs = codes.shape
    if scales.dtype not in _SCALES:
        raise ModelFileError(
            str(scales.path), name, f"has scales of type {scales.dtype}; only {', '.join(_SCALES)} can be read"
        )
    if block is not None and scales.shape == (-(-rows // block[0]), -(-inputs // block[1])):
        return block
    if scales.shape in ((), (1,), (1, 1)):
        return rows, inputs
    if scales.shape in ((rows,), (rows, 1)):
        return 1, inputs
    blocks = f"blocks of {block[0]} x {block[1]}, " if block else ""
    raise ModelFileError(
        str(scales.path),
        name,
        f"has scales of shape {scales.shape}, which are not for {blocks}rows or all of a matrix of {codes.shape}",
    )
