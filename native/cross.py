"""Builds the compiled kernels for other kinds of machines: `make cross`.

Uses the same CMakeLists.txt, with the clang of the package `ziglang`: one compiler with the headers and libraries of
every system. Shows that the source compiles with another compiler and for other processors, and which instruction sets
are built. Nothing is run. `make dist` builds a release's wheels with the same compiler and options (release/wheels.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

__all__ = ["ISAS", "TARGETS", "Target", "build", "cmake_options", "describe", "zig_cache"]


class Target(NamedTuple):
    """A system and a processor to build for."""

    system: str  # CMake's name
    processor: str  # CMake's name
    oldest: str  # version of the oldest system to run on, as zig takes it after the target's name: glibc, or macOS
    place: int  # offset in a module (ELF, Mach-O) of the field that says which processor it is for
    machine: bytes  # the bytes of that field


TARGETS = {
    "x86_64-linux-gnu": Target("Linux", "x86_64", "2.28", 18, b"\x3e\0"),
    "aarch64-linux-gnu": Target("Linux", "aarch64", "2.28", 18, b"\xb7\0"),
    "x86_64-macos": Target("Darwin", "x86_64", "14.0", 4, b"\x07\0\0\x01"),
    "aarch64-macos": Target("Darwin", "arm64", "14.0", 4, b"\x0c\0\0\x01"),
}
"""Targets by zig's names. The oldest systems are torch's: its wheels need glibc 2.28 and macOS 14 too."""

ISAS = ("avx512_amx", "avx512_bf16", "avx512", "avx2", "portable")

# On macOS, CMake asks for a bundle and nanobind for a file of flags. Zig knows neither; Python loads a library too.
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


def cmake_options(target: str, folder: Path, include: Path) -> dict[str, str]:
    """Return the options that make CMake build for `target`. Writes the compiler, a script, into `folder`.

    Args:
        target: one of `TARGETS`.
        folder: where the script is written.
        include: the headers of a Python; the module will be for its version.
    """
    folder.mkdir(parents=True, exist_ok=True)
    zig = folder / "zig"
    zig.write_text(ZIG.format(python=sys.executable), encoding="utf-8")
    zig.chmod(0o755)
    return {
        "CMAKE_SYSTEM_NAME": TARGETS[target].system,
        "CMAKE_SYSTEM_PROCESSOR": TARGETS[target].processor,
        "CMAKE_CXX_COMPILER": f"{zig};c++;-target;{target}.{TARGETS[target].oldest}",
        "CMAKE_CXX_ARCHIVE_CREATE": f"{zig} ar qc <TARGET> <OBJECTS>",
        "CMAKE_CXX_ARCHIVE_FINISH": "",
        "Python_INCLUDE_DIR": str(include),
    }


def build(target: str, source: Path, folder: Path, goal: str = "_native") -> Path:
    """Build for a target in `folder` with CMake; if that fails, this program ends with CMake's output.

    Args:
        target: one of `TARGETS`.
        source: the folder of CMakeLists.txt.
        folder: where to build.
        goal: `_native`, the module for this Python; or `penstock_kernels`, its part that does not depend on Python.
    """
    options = cmake_options(target, folder, Path(sysconfig.get_path("include"))) | {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": str(Path(sysconfig.get_path("scripts")) / "ninja"),
        "Python_EXECUTABLE": sys.executable,
        "SKBUILD_SOABI": target,
    }
    settings = [f"-D{name}={value}" for name, value in options.items()]
    run(["-S", str(source), "-B", str(folder), "-G", "Ninja", *settings])
    run(["--build", str(folder), "--target", goal])
    return next(folder.glob("_native*.so" if goal == "_native" else f"lib{goal}.a"))


def zig_cache() -> dict[str, str]:
    """Return variables that make zig keep its cache beside the environment that it is installed in."""
    folder = str(Path(sys.prefix).parent / "cache")
    return {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}


def run(arguments: list[str]) -> None:
    """Run CMake, quietly unless it fails."""
    command = [sys.executable, "-m", "cmake", *arguments]
    environment = zig_cache() | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603 (our own words)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def describe(target: str, module: bytes) -> str:
    """Return one line about a module; if the module is not what its target needs, this program ends with the reason."""
    processor, place, machine = TARGETS[target].processor, TARGETS[target].place, TARGETS[target].machine
    isas = [isa for isa in ISAS if re.search(rb"(?<![a-z0-9_])" + isa.encode() + rb"\0", module)]
    line = f"{target:18} {len(module) / 1e6:.1f} MB, kernels: {', '.join(isas)}"
    if not module.startswith(machine, place) or isas != list(ISAS if processor == "x86_64" else ISAS[-1:]):
        sys.exit(f"{line}: not for {processor}, or not all that it should have and no more")
    return line


if __name__ == "__main__":
    for name in TARGETS:
        module = build(name, Path(__file__).parent, Path(sys.argv[1]).resolve() / name)
        sys.stdout.write(describe(name, module.read_bytes()) + "\n")
        sys.stdout.flush()
