"""The header of a GGUF file: metadata and where tensors are stored, checked against the file's size.

Decides what a well-formed file is, by the format's specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):
versions 2 and 3, little-endian; tensors follow each other in order, aligned, without holes or overlaps. Every count and
length is checked before anything is allocated for it. Does not know what keys and tensors mean.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from penstock.contract.errors import ModelFileError
from penstock.weights.source import is_decent_name, open_binary

__all__ = [
    "BLOCK_TYPES",
    "GGML_TYPE_NAMES",
    "READABLE_TYPES",
    "BlockType",
    "GgufHeader",
    "GgufTensor",
    "read_gguf_header",
]


@dataclass(frozen=True, slots=True)
class BlockType:
    """How numbers are stored: `elements` of them in every `bytes` bytes."""

    name: str
    elements: int
    bytes: int


READABLE_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
"""Types that can be read, by their number in the file."""

BLOCK_TYPES = frozenset(kind.name for kind in READABLE_TYPES.values() if kind.elements > 1)
"""Names of the quantised block types."""

GGML_TYPE_NAMES: Mapping[int, str] = {
    **{number: kind.name for number, kind in READABLE_TYPES.items()},
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of the types that the format knows, for messages."""

_MAX_ITEMS = 1 << 23  # keys, array items and tensors of one header in total; a large vocabulary has fewer than 2^20
_MAX_STRING = 1 << 24
_LENGTH = struct.Struct("<Q")  # a string's length, stored before it
_MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is stored.

    Attributes:
        path: the file.
        shape: slowest dimension first (the file lists them in reverse).
        offset: position of its first byte in the file.
        bytes: its size.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.bytes // self.kind.bytes * self.kind.elements


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The contents of a file's header.

    Attributes:
        metadata: scalars as bool, int, float or str; arrays as tuples.
        data_start: position where tensor data begins.
        parts: all files that hold the tensors.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data_start: int
    parts: tuple[Path, ...]


class _Cursor:
    """Reads values from a file in order; owned by one `read_gguf_header` call."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self._stream = stream
        self._path = path
        self._items = 0
        self.left = size
        self.where = "header"

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(str(self._path), self.where, message)

    def take(self, count: int) -> bytes:
        data = self._stream.read(count) if count <= self.left else b""
        if len(data) < count:
            self._lacks(count, self.left)
        self.left -= count
        return data

    def _lacks(self, count: int, left: int) -> NoReturn:
        """Raise the error for a read of `count` bytes that failed when the file had `left` bytes left."""
        if count > left:
            raise self.fail(f"needs {count} bytes where the file has {left} left")
        raise self.fail("the file became shorter while it was read")

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, smallest: int) -> int:
        """Read a count of items of at least `smallest` bytes each."""
        count: int = self.number("Q")
        self._items += count
        if count * smallest > self.left or self._items > _MAX_ITEMS:
            raise self.fail(f"announces {count} items, more than the file or the reader can hold")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> tuple[str, ...]:
        """Read `count` strings, in one loop with few calls: a vocabulary has a hundred thousand strings or more."""
        read, length_of, left, texts = self._stream.read, _LENGTH.unpack, self.left, []
        for _ in range(count):
            head = read(_LENGTH.size) if left >= _LENGTH.size else b""
            if len(head) < _LENGTH.size:
                self._lacks(_LENGTH.size, left)
            (length,) = length_of(head)
            left -= _LENGTH.size
            if length > _MAX_STRING:
                raise self.fail(f"a string of {length} bytes is above the limit of {_MAX_STRING}")
            data = read(length) if length <= left else b""
            if len(data) < length:
                self._lacks(length, left)
            left -= length
            try:
                texts.append(data.decode())
            except UnicodeDecodeError as error:
                raise self.fail(f"is not UTF-8: {error.reason}") from error
        self.left = left
        return tuple(texts)

    def name(self) -> str:
        name = self.string()
        if not is_decent_name(name):
            raise self.fail(f"{reprlib.repr(name)} is no name: too long, or not printable")
        return name

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        raise self.fail(f"unknown value type {kind}")

    def array(self) -> tuple[Any, ...]:
        kind = self.number("I")
        if kind == _STRING:
            return self.strings(self.count(_LENGTH.size))
        if kind not in _SCALARS:
            raise self.fail(f"array of unknown or nested type {kind}")
        code = _SCALARS[kind]
        count = self.count(struct.calcsize("<" + code))
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code)))


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header.

    Raises:
        ModelFileError: it contradicts the format or the file's size, or uses a tensor type that cannot be read.
    """
    with open_binary(path) as raw:
        size = raw.seek(0, 2)
    with path.open("rb", buffering=1 << 16) as stream:
        cursor = _Cursor(stream, path, size)
        _check_start(cursor)
        num_tensors, num_keys = cursor.count(1), cursor.count(1)
        metadata = _read_metadata(cursor, num_keys)
        infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = _alignment(cursor, metadata)
        data_start = _aligned(size - cursor.left, alignment)
        cursor.where = "padding"
        # the specification wants zeros; anything else means that bytes before the data were lost
        if infos and any(cursor.take(data_start - (size - cursor.left))):
            raise cursor.fail("the bytes between header and data are not zero")
    return GgufHeader(path, metadata, _place(path, infos, data_start, alignment, size), data_start, (path,))


def _check_start(cursor: _Cursor) -> None:
    cursor.where = "magic"
    if cursor.take(4) != b"GGUF":
        raise cursor.fail("this is not a GGUF file")
    cursor.where = "version"
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise cursor.fail("big-endian files cannot be read")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} cannot be read; versions 2 and 3 can")
    cursor.where = "header"


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    cursor.where = "general.alignment"
    alignment = metadata.get(cursor.where, 32)
    # bool is an int to Python, and 2^20 is far above any alignment in use
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fail(f"must be a power of two, got {reprlib.repr(alignment)}")
    return alignment


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        cursor.where = "metadata"
        cursor.where = key = cursor.name()
        if key in metadata:
            raise cursor.fail("appears twice")
        metadata[key] = cursor.value()
    return metadata


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    """Name, shape, type and offset in the data section."""
    cursor.where = "tensors"
    cursor.where = name = cursor.name()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in READABLE_TYPES:
        kind = GGML_TYPE_NAMES.get(number, f"of unknown number {number}")
        readable = ", ".join(block.name for block in READABLE_TYPES.values())
        raise cursor.fail(f"has type {kind}, which cannot be read; {readable} can")
    return name, shape, READABLE_TYPES[number], offset


def _place(
    path: Path, infos: list[tuple[str, tuple[int, ...], BlockType, int]], data_start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Locate tensors, checking that they follow each other in order, as every writer lays them out, to the file end."""
    tensors: dict[str, GgufTensor] = {}
    position = 0
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelFileError(str(path), name, "appears twice")
        if offset != position:
            raise ModelFileError(str(path), name, f"begins at {offset} of the data, expected {position}")
        elements = 1
        for dimension in shape:
            elements *= dimension
        if elements == 0 or shape[-1] % kind.elements:
            raise ModelFileError(str(path), name, f"shape {shape} cannot be stored as {kind.name}")
        length = elements // kind.elements * kind.bytes
        if data_start + position + length > size:
            raise ModelFileError(str(path), name, f"needs {length} bytes, beyond the end of the file ({size} bytes)")
        tensors[name] = GgufTensor(path, name, shape, kind, data_start + position, length)
        position = _aligned(position + length, alignment)
    if tensors and size > data_start + position:
        raise ModelFileError(str(path), "", f"has {size} bytes, but its tensors end at {data_start + position}")
    return tensors


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
