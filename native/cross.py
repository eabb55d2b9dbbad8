"""Builds the compiled kernels for machines that this one is not: `make cross`.

By the same CMakeLists.txt, with clang as the package `ziglang` brings it: one compiler with the headers and libraries
of every system. Shows that another compiler and other processors take the source, and which instruction sets come of
it. Nothing is run, and nothing is to be used: what zig links for x86-64 cannot ask the processor, and takes `portable`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

TARGETS = {
    "x86_64-linux-gnu": ("Linux", "x86_64", 18, b"\x3e\0"),
    "aarch64-linux-gnu": ("Linux", "aarch64", 18, b"\xb7\0"),
    "x86_64-macos": ("Darwin", "x86_64", 4, b"\x07\0\0\x01"),
    "aarch64-macos": ("Darwin", "arm64", 4, b"\x0c\0\0\x01"),
}
"""CMake's names of system and processor; where a module (ELF, Mach-O) says for which processor it is, and how."""

ISAS = ("avx512_bf16", "avx512", "avx2", "portable")

# On macOS, CMake asks for a bundle and nanobind for a file of flags. Zig knows neither; Python loads a library as well.
ZIG = """#!/bin/sh
for given; do
    shift
    case $given in
        -bundle) set -- "$@" -dynamiclib -undefined dynamic_lookup ;;
        -Wl,@*) ;;
        *) set -- "$@" "$given" ;;
    esac
done
exec "{python}" -m ziglang "$@"
"""


def build(target: str, folder: Path) -> bytes:
    """The module for a target, built in `folder`; where it cannot be built, this program ends with what was said."""
    folder.mkdir(parents=True, exist_ok=True)
    zig = folder / "zig"
    zig.write_text(ZIG.format(python=sys.executable))
    zig.chmod(0o755)
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_SYSTEM_NAME": TARGETS[target][0],
        "CMAKE_SYSTEM_PROCESSOR": TARGETS[target][1],
        "CMAKE_MAKE_PROGRAM": Path(sysconfig.get_path("scripts")) / "ninja",
        "CMAKE_CXX_COMPILER": f"{zig};c++;-target;{target}",
        "CMAKE_CXX_ARCHIVE_CREATE": f"{zig} ar qc <TARGET> <OBJECTS>",
        "CMAKE_CXX_ARCHIVE_FINISH": "",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),
        "SKBUILD_SOABI": target,
    }
    settings = [f"-D{name}={value}" for name, value in options.items()]
    run(["-S", str(Path(__file__).parent), "-B", str(folder), "-G", "Ninja", *settings])
    run(["--build", str(folder)])
    return next(folder.glob("_native*.so")).read_bytes()


def run(arguments: list[str]) -> None:
    """CMake, quiet while it succeeds."""
    command = [sys.executable, "-m", "cmake", *arguments]
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(Path(sys.prefix).parent / "cache")} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603 (our own words)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def describe(target: str, module: bytes) -> str:
    """One line about a module; where it is not what its target should have, this program ends with it."""
    _, processor, place, machine = TARGETS[target]
    isas = [isa for isa in ISAS if re.search(rb"(?<![a-z0-9_])" + isa.encode() + rb"\0", module)]
    line = f"{target:18} {len(module) / 1e6:.1f} MB, kernels: {', '.join(isas)}"
    if not module.startswith(machine, place) or isas != list(ISAS if processor == "x86_64" else ISAS[-1:]):
        sys.exit(f"{line}: not for {processor}, or not all that it should have and no more")
    return line


if __name__ == "__main__":
    for name in TARGETS:
        sys.stdout.write(describe(name, build(name, Path(sys.argv[1]).resolve() / name)) + "\n")
        sys.stdout.flush()
