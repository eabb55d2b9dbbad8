"""FP8 in safetensors: a matrix `NAME.weight` in E4M3 and its scales, for blocks, rows or all of it.

Decides how the two belong together. `NAME.weight_scale_inv` (DeepSeek-V3, section 3.3; a factor all the same) or
`NAME.weight_scale` has a number for each block of rows and inputs, the last ones cut off; for each row; or one. Experts
of a layer may share a tensor, and one of scales: a matrix each. What a weight stands for is the product in float32.
E4M3 has 4 bits of significand and the scale up to 24, so no narrower form holds the product: in bfloat16 it is rounded.
Where a scale is for whole runs of 128 inputs, or for a whole row, codes and scales are kept apart: rows of bytes, as
`packed_weight.pack_fp8` takes them. A NaN among the codes is an error: no number of a model is one.
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
"""The code of NaN, of either sign: there are no infinities."""
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_ENDINGS = ("_scale_inv", "_scale")
_UNHEEDED = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".output_zero_point"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
"""What says how activations, keys and values would be rounded."""


@dataclass(frozen=True, slots=True)
class _Coded:
    """Where codes and the scales of their blocks lie."""

    codes: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    dtype: str = "FP8"
    """What the file stores."""

    @property
    def path(self) -> Path:
        """The file of the codes."""
        return self.codes.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the codes."""
        return self.codes.shape

    @property
    def elements(self) -> int:
        """How many numbers there are."""
        return self.codes.bytes

    @property
    def bytes(self) -> int:
        """Of both parts."""
        return self.codes.bytes + self.scales.bytes

    @property
    def kind(self) -> str:
        """`FP8` where a scale is for whole units of inputs, as the packed form has them; else nothing holds it."""
        inputs, width = self.shape[-1], self.block[1]
        return "FP8" if inputs <= MAX_INPUTS and (width % F8_UNIT == 0 or width >= inputs) else ""


@dataclass(frozen=True, slots=True)
class Fp8Matrix(_Coded):
    """Where a matrix lies; `block` rows and inputs have a scale in common."""

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
        """See `QuantisedMatrix.read_blocks`: of each row a scale for each 128 inputs, float32, and its codes."""
        rows, inputs = self.shape
        data = torch.empty(rows, f8_row_bytes(inputs), dtype=torch.uint8)
        units = torch.arange(0, inputs, F8_UNIT) // self.block[1]
        scales = self._scales(name).index_select(1, units)
        for start, codes in self._codes(name):
            of_rows = scales.index_select(0, self._scale_rows(start, len(codes)))
            data[start : start + len(codes)] = torch.cat((of_rows.view(torch.uint8), codes), dim=1)
        return data, False

    def _scales(self, name: str) -> Tensor:
        """One for each block, float32."""
        rows, inputs = self.shape
        height, width = self.block
        return read_part(name, self.scales, _SCALES).float().reshape(-(-rows // height), -(-inputs // width))

    def _scale_rows(self, start: int, count: int) -> Tensor:
        """Which row of scales is that of some rows."""
        return torch.arange(start, start + count) // self.block[0]

    def _codes(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Some rows after others, uint8, and which is the first.

        Raises:
            ModelFileError: one is NaN.
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
    """Where the matrices of a layer's experts lie, `[E, N, K]`, and their scales; all have them for the same blocks."""

    def slice(self, index: int) -> Fp8Matrix:
        """One of the matrices."""
        return Fp8Matrix(self.codes.slice(index), self.scales.slice(index), self.block)

    def read_numbers(self, name: str, out: Tensor) -> bool:
        """See `QuantisedMatrix.read_numbers`."""
        return sum(self.slice(index).read_numbers(name, out[index]) for index in range(self.shape[0])) > 0

    def read_blocks(self, name: str) -> tuple[Tensor, bool]:
        """Not called: each matrix has its own."""
        raise ModelFileError(str(self.path), name, "is a stack of matrices, which are read one at a time")


@functools.cache
def _numbers_of_codes() -> Tensor:
    """What each of 256 codes stands for: a look-up takes a sixth of the time of a conversion."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def find_fp8(stored: Mapping[str, StoredTensor], scheme: Quantisation) -> QuantisedMatrices:
    """The matrices of a checkpoint in FP8; what concerns activations, keys and values is hidden.

    Raises:
        ModelFileError: one has no scales, or scales that do not fit it.
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
    """Rows and inputs that a scale is for."""
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
