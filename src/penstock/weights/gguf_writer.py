"""Writes a GGUF file: header and layout by the format's specification, tensors piece by piece, all or nothing.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Version 3, little-endian, aligned to 32 bytes. The file
is written under a temporary name beside the target and renamed to the target when it is complete; if anything fails
before that, the unfinished file is removed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.weights.gguf_header import READABLE_TYPES, BlockType
from penstock.weights.unfinished import check_room, passing_name

__all__ = ["OutTensor", "write_gguf"]

_ALIGNMENT = 32
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {kind.name: number for number, kind in READABLE_TYPES.items()}


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to be written.

    Attributes:
        name: its name in the file.
        shape: slowest dimension first; the last dimension is a whole number of blocks of `kind`.
        pieces: yields its bytes in order, as uint8 `[bytes]` tensors on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements // self.kind.elements * self.kind.bytes


def write_gguf(
    target: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[OutTensor],
    *,
    settings: frozenset[str] = frozenset(),
    check: Callable[[Path], None] = lambda _: None,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a file.

    Args:
        target: its path; an existing file is replaced once the new one is complete.
        metadata: values of type bool, int, float or str, or sequences of one of these.
        tensors: in file order.
        settings: names of the tensors that readers treat as settings; they are written first.
        check: called with a file that has the header and the settings, and zeros for all other tensors; an exception
            from it aborts the write.
        advance: called with the number of tensor bytes just written.

    Raises:
        ConfigError: the disk is full, or the file cannot be written.
        ValueError: a piece cannot be produced.
    """
    partial = passing_name(target)
    header = _header(metadata, tensors)
    places, end = [], _aligned(len(header))
    for tensor in tensors:
        places.append(end)
        end = _aligned(end + tensor.bytes)
    first = [index for index, tensor in enumerate(tensors) if tensor.name in settings]
    others = [index for index, tensor in enumerate(tensors) if tensor.name not in settings]
    try:
        check_room(target.parent, end)
        with partial.open("wb") as stream:
            stream.write(header)
            stream.truncate(end)
            for number, index in enumerate((*first, *others)):
                if number == len(first):
                    stream.flush()
                    check(partial)
                _write(stream, tensors[index], places[index], advance)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(target)
    except OSError as error:
        raise ConfigError("TARGET", f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write(stream: BinaryIO, tensor: OutTensor, place: int, advance: Callable[[int], object]) -> None:
    stream.seek(place)
    for piece in tensor.pieces():
        stream.write(piece.contiguous().numpy().data)
        advance(piece.numel())
    written = stream.tell() - place
    assert written == tensor.bytes, f"{tensor.name} came as {written} bytes instead of {tensor.bytes}"


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _header(metadata: Mapping[str, Any], tensors: Sequence[OutTensor]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        parts += [_string(tensor.name), sizes, struct.pack("<IQ", _NUMBERS[tensor.kind.name], offset)]
        offset = _aligned(offset + tensor.bytes)
    header = b"".join(parts)
    return header + bytes(_aligned(len(header)) - len(header))


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    if not isinstance(value, list | tuple):
        kind, code = _kind_of([value], is_array=False)
        return struct.pack("<I", kind) + (_string(value) if kind == _STRING else struct.pack(f"<{code}", value))
    kind, code = _kind_of(value, is_array=True)
    head = struct.pack("<IIQ", _ARRAY, kind, len(value))
    return head + (b"".join(map(_string, value)) if kind == _STRING else struct.pack(f"<{len(value)}{code}", *value))


def _kind_of(values: Sequence[Any], *, is_array: bool) -> tuple[int, str]:
    """GGUF type number and `struct` code for these values; integers take 32 bits if that suffices.

    Arrays of integers are signed: llama.cpp accepts token types only as signed integers.
    """
    types = {type(value) for value in values}
    if types <= {str}:  # an empty array is written as strings: only lists of merges may be empty
        return _STRING, ""
    if types == {bool}:
        return _BOOL, "?"
    if types == {int}:
        least, most = min(values), max(values)
        if least >= 0 and not is_array:
            return (4, "I") if most < 1 << 32 else (10, "Q")
        return (5, "i") if least >= -(1 << 31) and most < 1 << 31 else (11, "q")
    assert types <= {int, float}, f"values of types {types} cannot be written"
    return 6, "f"
