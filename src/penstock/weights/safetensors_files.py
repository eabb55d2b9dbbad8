"""Tensors in safetensors files: one file, or shards listed by `model.safetensors.index.json`.

Decides what a well-formed file is, by the format's own rules (https://github.com/huggingface/safetensors#format): a
little-endian uint64 header length of at most 100 MB, a JSON object, then data that the tensors cover without holes or
overlaps. Nothing in a header is trusted before it is checked against the file's size; integers are Python's and cannot
overflow. Does not know what the tensors mean.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.contract.errors import ModelFileError
from penstock.weights.source import TensorSource, is_decent_name, open_binary, read_elements

__all__ = ["INDEX_FILE", "SafetensorsSource", "StoredTensor", "load_json_object", "open_safetensors", "read_header"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000
_MAX_JSON_BYTES = 256 << 20
_MAX_DIMENSIONS = 16
_MAX_DEPTH = 64
_WEIGHTS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64}
_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored.

    Attributes:
        dtype: the format's name for the type, such as `BF16`.
        offset: position of its first byte in the file.
        bytes: its size.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.bytes * 8 // _BITS[self.dtype]

    def slice(self, index: int) -> StoredTensor:
        """One slice along the first dimension."""
        count = self.bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * count, bytes=count)


class SafetensorsSource(TensorSource):
    """The tensors of one checkpoint, read from its files on demand."""

    def __init__(self, tensors: Mapping[str, StoredTensor], file: str) -> None:
        self._tensors = dict(tensors)
        self._file = file

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Where each tensor is stored, by name."""
        return self._tensors

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._find(name).shape

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        self._read(name, self._find(name), out)

    def read_slice_into(self, name: str, index: int, out: torch.Tensor) -> None:
        """See `TensorSource.read_slice_into`; reads only the slice."""
        self._read(name, self._find(name).slice(index), out)

    def _read(self, name: str, tensor: StoredTensor, out: torch.Tensor) -> None:
        kinds, what = (_WEIGHTS, "weights") if out.is_floating_point() else (_INTEGERS, "integers")
        dtype = kinds.get(tensor.dtype)
        if dtype is None:
            raise ModelFileError(
                str(tensor.path), name, f"has type {tensor.dtype}; {what} can be read as {', '.join(kinds)}"
            )
        if tuple(out.shape) != tensor.shape:
            raise ModelFileError(str(tensor.path), name, f"has shape {tensor.shape}, expected {tuple(out.shape)}")
        read_elements(tensor.path, name, tensor.offset, dtype, out)

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ModelFileError(self._file, name, "the checkpoint has no such tensor")
        return self._tensors[name]


def open_safetensors(directory: Path) -> SafetensorsSource:
    """The tensors of a directory: `model.safetensors`, or otherwise the shards of `model.safetensors.index.json`.

    Raises:
        ModelFileError: the directory has neither, or a file is malformed.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return SafetensorsSource(read_header(single), str(single))
    if index.is_file():
        return SafetensorsSource(_read_shards(index), str(index))
    pickles = [path.name for path in sorted(directory.iterdir()) if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise ModelFileError(
            str(directory / pickles[0]),
            "",
            "holds Python pickles, which can run any code and are never read; convert the checkpoint to safetensors",
        )
    raise ModelFileError(str(directory), "", f"has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    weight_map = load_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(str(index), "weight_map", "must be an object that maps tensor names to files")
    _check_names(index, weight_map)
    for name, shard in weight_map.items():
        if not _is_plain_name(shard):
            raise ModelFileError(
                str(index), f"weight_map.{name}", f"{reprlib.repr(shard)} is not a file name in this directory"
            )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(index.parent / shard).items():
            if name in tensors:
                raise ModelFileError(str(tensor.path), name, f"is also in {tensors[name].path.name}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ModelFileError(str(index), f"weight_map.{name}", f"{shard} has no such tensor")
    return tensors


def _is_plain_name(shard: Any) -> bool:
    if not isinstance(shard, str) or not shard.endswith(".safetensors"):
        return False
    return is_decent_name(shard) and not any(mark in shard for mark in "/\\:")


def load_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object.

    Raises:
        ModelFileError: it is missing, too large, not JSON, or not an object.
    """
    with open_binary(path) as stream:
        raw = stream.read(_MAX_JSON_BYTES + 1)
    if len(raw) > _MAX_JSON_BYTES:
        raise ModelFileError(str(path), "", f"is larger than {_MAX_JSON_BYTES} bytes")
    return _parse_object(raw, path, "")


def _parse_object(raw: bytes, path: Path, key: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        _check_depth(value)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ModelFileError(str(path), key, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(str(path), key, f"must be a JSON object, got {type(value).__name__}")
    return value


def _check_depth(value: Any) -> None:
    """Refuse deeply nested values, which no model's file has, so that later code can recurse safely."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {reprlib.repr(name)} appears twice")
        values[name] = value
    return values


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises:
        ModelFileError: it contradicts the format or the file's size.
    """
    file = str(path)
    with open_binary(path) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelFileError(file, "header length", f"{length} bytes do not fit a file of {size}")
        if length > _MAX_HEADER_BYTES:
            raise ModelFileError(file, "header length", f"{length} is above the format's {_MAX_HEADER_BYTES}")
        header = _parse_object(stream.read(length), path, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(file, "__metadata__", "must map strings to strings")
    _check_names(path, header)
    tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_coverage(path, tensors, 8 + length, size)
    return tensors


def _check_names(path: Path, names: Iterable[str]) -> None:
    for name in names:
        if not is_decent_name(name):
            raise ModelFileError(str(path), "", f"{reprlib.repr(name)} is no name: too long, or not printable")


def _stored(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    file = str(path)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(file, name, "must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ModelFileError(file, name, f"unknown dtype {reprlib.repr(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ModelFileError(file, name, f"shape must be a list of at most {_MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(file, name, "data_offsets must be two rising positions")
    begin, end = offsets
    if end > size - data_start:
        raise ModelFileError(file, name, f"ends at byte {data_start + end}, beyond the file's {size}")
    bits = _BITS[dtype]
    for dimension in shape:
        bits *= dimension
    if bits != (end - begin) * 8:
        raise ModelFileError(file, name, f"shape {tuple(shape)} of {dtype} does not fill its {end - begin} bytes")
    return StoredTensor(path, dtype, tuple(shape), data_start + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    """Whether `value` is a list of integers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_coverage(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """Check that tensors cover the data exactly: the format allows neither gaps nor overlaps."""
    position = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if tensor.offset != position:
            fault = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise ModelFileError(str(path), name, f"{fault} (begins at {tensor.offset}, expected {position})")
        position += tensor.bytes
    if position != size:
        raise ModelFileError(str(path), "", f"has {size} bytes, but its tensors end at {position}")
