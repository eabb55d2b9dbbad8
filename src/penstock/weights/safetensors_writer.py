"""Writes `model.safetensors`, and a model directory with a `config.json`, by the format's own rules.

See https://github.com/huggingface/safetensors#format: header length, JSON header, then the tensors without holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from penstock.contract.errors import ConfigError

__all__ = ["OutTensors", "write_model_directory", "write_safetensors"]

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_INTEGER_NAMES = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_ALIGNMENT = 8
_WRITTEN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class OutTensors:
    """Tensors that are made together, only when they are written.

    Attributes:
        sizes: dtypes and shapes by name.
        make: makes the tensors, on the CPU.
    """

    sizes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    make: Callable[[], Mapping[str, torch.Tensor]]

    @property
    def bytes(self) -> int:
        """Total size in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.sizes.values())


def write_model_directory(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a model into a directory, which is created if needed and must not already hold a model.

    Raises:
        ConfigError: the directory holds a model, a tensor is not of a float type, or the files cannot be written.
    """
    for name in ("config.json", "model.safetensors"):
        if (directory / name).exists():
            raise ConfigError("OUT_DIR", f"{directory / name} exists already")
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError("IN.pt", f"{name} is of type {tensor.dtype}, which holds no weights")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_tensors(directory / "model.safetensors", tensors)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("OUT_DIR", f"{directory} cannot be written: {error.strerror}") from error


def _write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(file, [OutTensors(sizes, lambda: tensors)])


def write_safetensors(
    file: Path, tensors: Sequence[OutTensors], advance: Callable[[int], object] = lambda _: None
) -> None:
    """Write a file of tensors, making one group of them at a time in memory.

    Args:
        file: its path; the caller removes it if this fails.
        tensors: groups of tensors; names must be unique.
        advance: called with the number of tensor bytes just written.

    Raises:
        OSError: the file cannot be written.
    """
    sizes = {name: size for each in tensors for name, size in each.sizes.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, position = {}, 0
    for name, (dtype, shape) in sorted(sizes.items()):
        places[name], end = position, position + math.prod(shape) * dtype.itemsize
        stored = (_NAMES | _INTEGER_NAMES)[dtype]
        header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        first = stream.tell()
        stream.truncate(first + position)
        for each in tensors:
            for name, tensor in each.make().items():
                assert (tensor.dtype, tuple(tensor.shape)) == each.sizes[name], f"{name} is of another type or shape"
                _write_tensor(stream, first + places[name], tensor, advance)


def _write_tensor(stream: BinaryIO, place: int, tensor: torch.Tensor, advance: Callable[[int], object]) -> None:
    stream.seek(place)
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _WRITTEN_BYTES):
        piece = data[start : start + _WRITTEN_BYTES]
        stream.write(piece)
        advance(len(piece))
