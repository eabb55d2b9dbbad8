"""Writes small Mach-O files, as a linker for Apple silicon does, with an ad-hoc signature."""

from __future__ import annotations

import hashlib
import struct

PAGE = 4096
SYSTEM_LIBRARY = "/usr/lib/libSystem.B.dylib"


def mach_o(
    *isas: str,
    version: tuple[int, int] = (14, 0),
    system: int = 1,
    libraries: tuple[str, ...] = (SYSTEM_LIBRARY,),
    signed: bool = True,
    dated: bool = True,
) -> bytes:
    """A module that names instruction sets, is built for a macOS version and needs libraries."""
    commands = [command(0x0C, library(name)) for name in libraries]
    if dated:
        commands.append(command(0x32, struct.pack("<4I", system, version[0] << 16 | version[1] << 8, 0, 0)))
    content = b"".join(b"\0" + isa.encode() + b"\0" for isa in isas) + bytes(PAGE)
    length = sum(map(len, commands)) + (16 if signed else 0)
    start = 32 + length + len(content)
    if signed:
        commands.append(command(0x1D, struct.pack("<2I", start, len(signature(bytes(start))))))
    header = struct.pack("<8I", 0xFEEDFACF, 0x0100000C, 0, 6, len(commands), length, 0, 0)
    module = header + b"".join(commands) + content
    return module + signature(module) if signed else module


def command(kind: int, content: bytes) -> bytes:
    return struct.pack("<2I", kind, 8 + len(content)) + content


def library(name: str) -> bytes:
    text = name.encode() + b"\0"
    return struct.pack("<4I", 24, 0, 0, 0) + text.ljust(-(-len(text) // 8) * 8, b"\0")


def signature(module: bytes) -> bytes:
    pages = [module[place : place + PAGE] for place in range(0, len(module), PAGE)]
    hashes = b"".join(hashlib.sha256(page).digest() for page in pages)
    length = 44 + len(hashes)
    fields = (0xFADE0C02, length, 0x20400, 2, 44, 0, 0, len(pages), len(module))
    directory = struct.pack(">9I4BI", *fields, 32, 2, 0, 12, 0)[:44] + hashes
    return struct.pack(">5I", 0xFADE0CC0, 20 + length, 1, 0, 20) + directory
