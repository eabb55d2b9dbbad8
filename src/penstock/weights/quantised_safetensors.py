"""Quantised safetensors: the several tensors of a quantised matrix, read as one.

Treats a matrix as quantised if its parts are in the files, whatever module names the settings list, so no list of
unquantised modules is needed. Each format decides which tensors belong together: `integer_safetensors`,
`compressed_tensors`, `fp8_safetensors`, `nf4_safetensors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.safetensors_files import SafetensorsSource, StoredTensor
from penstock.weights.source import StoredBlocks, TensorSource, open_binary, read_bytes

__all__ = [
    "QUANTISED_TYPES",
    "QuantisedMatrices",
    "QuantisedMatrix",
    "QuantisedSource",
    "QuantisedStack",
    "check_shape",
    "check_type",
    "read_part",
    "read_rows",
]

QUANTISED_TYPES = frozenset({"INT4", "INT8", "FP8", "NF4", "FP4"})
"""The values of `QuantisedMatrix.dtype`."""

_WIDER = ("F64", "F32", "F16")
"""Plain types that bfloat16 cannot represent without rounding."""

_TORCH_TYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class QuantisedMatrix(Protocol):
    """A matrix stored as several tensors."""

    @property
    def path(self) -> Path:
        """The file of its codes."""
        ...

    @property
    def dtype(self) -> str:
        """The stored type, one of `QUANTISED_TYPES`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded matrix."""
        ...

    @property
    def elements(self) -> int:
        """Number of elements."""
        ...

    @property
    def bytes(self) -> int:
        """Size in the files."""
        ...

    @property
    def kind(self) -> str:
        """The kind of block that holds the codes without loss; "" for none."""
        ...

    def read_numbers(self, name: str, out: Tensor) -> bool:
        """Fill `out`; returns whether any number was rounded. Raises as `TensorSource.read_into`."""
        ...

    def read_blocks(self, name: str) -> tuple[Tensor, bool]:
        """Its blocks, uint8 `[N, bytes per row]`, and whether any scale was rounded; not called if `kind` is ""."""
        ...


@runtime_checkable
class QuantisedStack(QuantisedMatrix, Protocol):
    """Matrices of the same shape, one per expert, stacked along the first dimension of their tensors."""

    def slice(self, index: int) -> QuantisedMatrix:
        """One of the matrices."""
        ...


@dataclass(frozen=True, slots=True)
class QuantisedMatrices:
    """The matrices that a format found in the files.

    Attributes:
        matrices: by the names under which models take them.
        hidden: tensors that are parts of these matrices, or concern activations, keys and values.
    """

    matrices: Mapping[str, QuantisedMatrix]
    hidden: frozenset[str]


class QuantisedSource(TensorSource):
    """A safetensors checkpoint with some quantised matrices; owned by the code that loads from it.

    Args:
        plain: the checkpoint.
        found: its quantised matrices.
        unheeded: see `TensorSource.unheeded`.

    Attributes:
        stored: where each tensor is stored, by name.
    """

    def __init__(self, plain: SafetensorsSource, found: QuantisedMatrices, unheeded: Sequence[str] = ()) -> None:
        self._plain = plain
        self._unheeded = tuple(unheeded)
        self._matrices = found.matrices
        self._rounded: Counter[str] = Counter()
        left = {name: tensor for name, tensor in plain.stored.items() if name not in found.hidden}
        for name in left.keys() & found.matrices.keys():
            raise ModelFileError(str(left[name].path), name, "is there twice: quantised, and as plain numbers")
        self.stored: Mapping[str, StoredTensor | QuantisedMatrix] = {**left, **found.matrices}

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._matrices[name].shape if name in self._matrices else self._plain.shape(name)

    def stored_kind(self, name: str) -> str:
        """See `TensorSource.stored_kind`."""
        return self._matrices[name].kind if name in self._matrices else ""

    def rounded(self) -> Mapping[str, int]:
        """See `TensorSource.rounded`."""
        return dict(self._rounded)

    def unheeded(self) -> Sequence[str]:
        """See `TensorSource.unheeded`."""
        return self._unheeded

    def spare(self, name: str) -> bool:
        """True for an all-zero bias of a quantised matrix: some tools wrote one for every projection."""
        module = name.removesuffix(".bias")
        if module == name or f"{module}.weight" not in self._matrices:
            return False
        return not bool(self._plain.read(name, torch.float32, "cpu").any())

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        matrix = self._matrices.get(name)
        if matrix is None:
            self._plain.read_into(name, out)
            if out.dtype == torch.bfloat16 and self._plain.stored[name].dtype in _WIDER:
                self._rounded[f"{self._plain.stored[name].dtype} to bfloat16"] += 1
            return
        if tuple(out.shape) != matrix.shape:
            raise ModelFileError(str(matrix.path), name, f"has shape {matrix.shape}, expected {tuple(out.shape)}")
        self._note(matrix, matrix.read_numbers(name, out), out.dtype)

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """See `TensorSource.read_slice_into`."""
        matrix = self._matrices.get(name)
        if matrix is None:
            self._plain.read_slice_into(name, index, out)
        elif isinstance(matrix, QuantisedStack):
            self._note(matrix, matrix.slice(index).read_numbers(name, out) and index == 0, out.dtype)
        else:
            super().read_slice_into(name, index, out)

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:
        """See `TensorSource.read_slice_blocks`."""
        matrix = self._matrices.get(name)
        if not isinstance(matrix, QuantisedStack) or not matrix.kind:
            return super().read_slice_blocks(name, index)
        return StoredBlocks(matrix.kind, matrix.slice(index).read_blocks(name)[0])

    def _note(self, matrix: QuantisedMatrix, rounded: bool, dtype: torch.dtype) -> None:
        if rounded:
            self._rounded[f"{matrix.dtype} to {str(dtype).removeprefix('torch.')}"] += 1

    def read_blocks(self, name: str) -> StoredBlocks:
        """See `TensorSource.read_blocks`."""
        matrix = self._matrices.get(name)
        if matrix is None or not matrix.kind:
            raise ModelFileError("", name, "is not stored in quantised blocks")
        data, rounded = matrix.read_blocks(name)
        if rounded:
            self._rounded[f"scales of {matrix.dtype} to float16"] += 1
        return StoredBlocks(matrix.kind, data)


def read_part(name: str, part: StoredTensor, allowed: Iterable[str]) -> Tensor:
    """Read a whole part, in its own dtype and shape.

    Raises:
        ModelFileError: its type is not allowed, or the file is shorter than when it was opened.
    """
    check_type(name, part, allowed)
    out = torch.empty(part.shape, dtype=_TORCH_TYPES[part.dtype])
    with open_binary(part.path) as stream:
        stream.seek(part.offset)
        read_bytes(stream, part.path, name, out)
    return out


def read_rows(name: str, part: StoredTensor, start: int, stop: int, allowed: Iterable[str]) -> Tensor:
    """Read rows `start` to `stop` of a part `[N, K]`; otherwise like `read_part`."""
    of_row = part.bytes // part.shape[0]
    rows = replace(
        part, shape=(stop - start, *part.shape[1:]), offset=part.offset + start * of_row, bytes=(stop - start) * of_row
    )
    return read_part(name, rows, allowed)


def check_type(name: str, part: StoredTensor, allowed: Iterable[str]) -> None:
    """Raise ModelFileError unless a part has one of the allowed types."""
    if part.dtype not in allowed:
        raise ModelFileError(str(part.path), name, f"has type {part.dtype}; only {', '.join(allowed)} can be read")


def check_shape(name: str, part: StoredTensor, *shapes: tuple[int, ...]) -> None:
    """Raise ModelFileError unless a part has one of these shapes."""
    if part.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ModelFileError(str(part.path), name, f"has shape {part.shape}, but {wanted} belongs to its matrix")
