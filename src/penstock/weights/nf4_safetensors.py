"""Bitsandbytes' 4-bit weights in safetensors: `NAME.weight` holds flat codes, and tensors beside it decode them.

Decides how the parts fit together (package `bitsandbytes`, `functional.QuantState`). Each byte holds two codes, the
first in the high nibble. `.quant_map` gives the value of each of the 16 codes, and `.absmax` the scale of each block:
as is, or itself quantised as indices into `.nested_quant_map`, times `.nested_absmax`, plus an offset.
`.quant_state.bitsandbytes__nf4` (or `fp4`) holds JSON as bytes: the shape, the block sizes and the offset.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.integer_matrix import place_numbers
from penstock.weights.quantised_safetensors import QuantisedMatrices, check_shape, read_part
from penstock.weights.safetensors_files import StoredTensor
from penstock.weights.source import PIECE_ELEMENTS

__all__ = ["find_nf4"]

_STATES = {".quant_state.bitsandbytes__nf4": "NF4", ".quant_state.bitsandbytes__fp4": "FP4"}
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_CODES, _MOST_STATE, _MOST_BLOCK = 16, 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True)
class _State:
    """The contents of the quant state's JSON."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


@dataclass(frozen=True, slots=True)
class Nf4Matrix:
    """Where a matrix is stored: `parts` by name suffix, "" for the codes."""

    dtype: str
    parts: Mapping[str, StoredTensor]
    state: _State

    @property
    def path(self) -> Path:
        """The file of the codes."""
        return self.parts[""].path

    @property
    def shape(self) -> tuple[int, ...]:
        """`[N, K]`."""
        return self.state.shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.state.shape[0] * self.state.shape[1]

    @property
    def bytes(self) -> int:
        """Total size of all parts in bytes."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def kind(self) -> str:
        """Always "": the matrix is not kept as blocks."""
        return ""

    def read_numbers(self, name: str, out: Tensor) -> bool:
        """See `QuantisedMatrix.read_numbers`."""
        codes = read_part(name, self.parts[""], ("U8",)).view(-1)
        table = read_part(f"{name}.quant_map", self.parts[".quant_map"], ("F32",))
        largest, block, flat = self._largest(name), self.state.block, out.view(-1)
        step, rounded = max(1, PIECE_ELEMENTS // block) * block, False
        for start in range(0, self.elements, step):
            some = codes[start // 2 : -(-min(start + step, self.elements) // 2)]
            numbers = table[torch.stack((some >> 4, some & 15), dim=1).flatten().int()]
            numbers = numbers[: len(flat[start : start + step])]
            factors = largest[torch.arange(start, start + len(numbers)) // block]
            rounded |= place_numbers(numbers * factors, flat[start : start + step], self.path, name)
        return rounded

    def _largest(self, name: str) -> Tensor:
        """The scale of each block, float32."""
        stored = read_part(f"{name}.absmax", self.parts[".absmax"], ("F32", "U8"))
        if stored.dtype == torch.float32:
            return stored
        table = read_part(f"{name}.nested_quant_map", self.parts[".nested_quant_map"], ("F32",))
        factors = read_part(f"{name}.nested_absmax", self.parts[".nested_absmax"], ("F32",))
        blocks = torch.arange(len(stored)) // self.state.nested_block
        return table[stored.int()] * factors[blocks] + self.state.offset

    def read_blocks(self, name: str) -> tuple[Tensor, bool]:
        """Never called, because there are no blocks."""
        raise ModelFileError(str(self.path), name, "is not stored in quantised blocks")


def find_nf4(stored: Mapping[str, StoredTensor]) -> QuantisedMatrices:
    """The matrices of a 4-bit bitsandbytes checkpoint.

    Raises:
        ModelFileError: the parts of a matrix do not fit each other.
    """
    matrices, hidden = {}, set[str]()
    for state in stored:
        ending = next((each for each in _STATES if state.endswith(each)), None)
        if ending is None:
            continue
        name = state.removesuffix(ending)
        if name not in stored:
            raise ModelFileError(str(stored[state].path), state, f"has no {name} beside it")
        parts = {each: stored[name + each] for each in ("", *_PARTS) if name + each in stored}
        nested = ".absmax" in parts and parts[".absmax"].dtype == "U8"
        found = _read_state(state, stored[state], _STATES[ending], nested)
        matrices[name] = _matrix(name, _STATES[ending], parts, found, nested)
        hidden |= {state, *(name + each for each in parts)}
    return QuantisedMatrices(matrices, frozenset(hidden))


def _matrix(name: str, dtype: str, parts: Mapping[str, StoredTensor], state: _State, nested: bool) -> Nf4Matrix:
    matrix = Nf4Matrix(dtype, parts, state)
    for ending in _PARTS if nested else _PARTS[:2]:
        if ending not in parts:
            raise ModelFileError(str(matrix.path), name, f"has no {name}{ending} beside it")
    bytes_, blocks = -(-matrix.elements // 2), -(-matrix.elements // state.block)
    check_shape(name, parts[""], (bytes_, 1), (1, bytes_), (bytes_,))
    check_shape(f"{name}.absmax", parts[".absmax"], (blocks,))
    check_shape(f"{name}.quant_map", parts[".quant_map"], (_CODES,))
    if nested:
        check_shape(f"{name}.nested_quant_map", parts[".nested_quant_map"], (256,))
        check_shape(f"{name}.nested_absmax", parts[".nested_absmax"], (-(-blocks // state.nested_block),))
    return matrix


def _read_state(name: str, part: StoredTensor, dtype: str, nested: bool) -> _State:
    """Parse the JSON of `name`; the keys for nested scales are required if the scales are nested."""
    file = str(part.path)
    if part.bytes > _MOST_STATE:
        raise ModelFileError(file, name, f"has {part.bytes} bytes; at most {_MOST_STATE} are read")
    raw = bytes(read_part(name, part, ("U8",)).tolist())
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(file, name, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelFileError(file, name, f"must be a JSON object, got {reprlib.repr(found)}")

    def count(value: Any, key: str, most: int) -> int:
        if type(value) is not int or not 1 <= value <= most:
            raise ModelFileError(file, f"{name}.{key}", f"must be 1 to {most}, got {reprlib.repr(value)}")
        return value

    shape = found.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise ModelFileError(file, f"{name}.shape", f"must be two sizes, got {reprlib.repr(shape)}")
    kind = found.get("quant_type", dtype.lower())
    if kind != dtype.lower():
        raise ModelFileError(
            file, f"{name}.quant_type", f"must be {dtype.lower()!r}, as its name says, got {reprlib.repr(kind)}"
        )
    offset = found.get("nested_offset") if nested else 0.0
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise ModelFileError(file, f"{name}.nested_offset", f"must be a number, got {reprlib.repr(offset)}")
    return _State(
        (count(shape[0], "shape", 1 << 31), count(shape[1], "shape", 1 << 31)),
        count(found.get("blocksize"), "blocksize", _MOST_BLOCK),
        count(found.get("nested_blocksize"), "nested_blocksize", _MOST_BLOCK) if nested else 0,
        float(offset),
    )
