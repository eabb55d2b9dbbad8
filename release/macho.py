"""Checks whether macOS on Apple silicon would load a compiled module, judging by its file: we have no Mac to try it on.

Formats: Apple's mach-o/loader.h, and the code directory of kern/cs_blobs.h.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["macho_problems"]

_MAGIC_64 = 0xFEEDFACF
_HEADER = struct.Struct("<8I")  # magic, processor, its kind, file type, commands, their bytes, flags, reserved
_LOAD_DYLIB, _CODE_SIGNATURE, _BUILD_VERSION = 0x0C, 0x1D, 0x32
_MACOS = 1
_SUPER_BLOB, _CODE_DIRECTORY = 0xFADE0CC0, 0xFADE0C02
_DIRECTORY = struct.Struct(
    ">9I4B"
)  # magic, length, version, flags, offsets of hashes and name, slots (2), limit; sizes
_SHA256 = 2


class _Command(NamedTuple):
    kind: int
    content: bytes  # after kind and size, which take 8 bytes


def macho_problems(module: bytes, oldest: tuple[int, int]) -> list[str]:
    """List what keeps macOS of version `oldest` from loading a module for one processor; empty if nothing is found."""
    try:
        commands = list(_commands(module))
        return [*_wrong_system(commands, oldest), *_wrong_libraries(commands), *_wrong_signature(module, commands)]
    except (struct.error, ValueError) as reason:
        return [f"no Mach-O file: {reason}"]


def _commands(module: bytes) -> Iterator[_Command]:
    header = _HEADER.unpack_from(module)
    if header[0] != _MAGIC_64:
        raise ValueError(f"it begins with {header[0]:#x}")
    place = _HEADER.size
    for _ in range(header[4]):
        kind, size = struct.unpack_from("<2I", module, place)
        if size < 8:
            raise ValueError(f"a command of {size} bytes")
        yield _Command(kind & 0x7FFFFFFF, module[place + 8 : place + size])
        place += size


def _wrong_system(commands: list[_Command], oldest: tuple[int, int]) -> Iterator[str]:
    for command in commands:
        if command.kind == _BUILD_VERSION:
            system, version = struct.unpack_from("<2I", command.content)
            needs = (version >> 16, version >> 8 & 0xFF)
            if system != _MACOS or needs > oldest:
                wanted = ".".join(map(str, oldest))
                yield f"it is for system {system} from {needs[0]}.{needs[1]} on, not for macOS {wanted}"
            return
    yield "it does not say for which macOS it is"


def _wrong_libraries(commands: list[_Command]) -> Iterator[str]:
    for command in commands:
        if command.kind == _LOAD_DYLIB:
            (offset,) = struct.unpack_from("<I", command.content)
            name = command.content[offset - 8 :].partition(b"\0")[0].decode()
            if not name.startswith(("/usr/lib/", "/System/")):
                yield f"it needs {name}, which is no part of macOS"


def _wrong_signature(module: bytes, commands: list[_Command]) -> Iterator[str]:
    """Check the signature: Apple silicon needs at least a hash of each page, and no change after it was made."""
    places = [struct.unpack_from("<2I", command.content) for command in commands if command.kind == _CODE_SIGNATURE]
    if not places:
        yield "it is not signed"
        return
    start, size = places[0]
    directory = _code_directory(module[start : start + size])
    if not directory:
        yield "its signature has no code directory"
        return
    fields = _DIRECTORY.unpack_from(directory)
    hashes, slots, limit, width, kind, page = fields[4], fields[7], fields[8], fields[9], fields[10], 1 << fields[12]
    if kind != _SHA256 or limit != start or slots != -(-limit // page):
        yield f"its signature (kind {kind}) covers {slots} pages up to byte {limit} of {start}"
        return
    for slot in range(slots):
        said = directory[hashes + slot * width : hashes + (slot + 1) * width]
        if hashlib.sha256(module[slot * page : min((slot + 1) * page, limit)]).digest() != said:
            yield f"its signature is wrong about page {slot}: it was changed after it was signed"
            return


def _code_directory(signature: bytes) -> bytes:
    """Return the first code directory of a signature; empty if there is none."""
    magic, _, count = struct.unpack_from(">3I", signature)
    for number in range(count if magic == _SUPER_BLOB else 0):
        (offset,) = struct.unpack_from(">I", signature, 12 + number * 8 + 4)
        if struct.unpack_from(">I", signature, offset)[0] == _CODE_DIRECTORY:
            return signature[offset:]
    return b""
