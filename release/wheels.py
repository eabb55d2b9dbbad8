"""Builds what a release consists of: the source archive, and from it wheels that need no compiler.

Each wheel holds the kernels of every instruction set of its platform; the machine that runs it decides which are used.
Python 3.11 has a wheel of its own; one wheel serves 3.12 and later, by the stable ABI, which nanobind supports from
3.12 on. The kernels do not depend on Python: they are compiled once for each platform, and linked into both wheels. The
compiler is the one of `make cross`, with its options.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import cross

__all__ = [
    "ABIS",
    "PLATFORMS",
    "Abi",
    "Interpreter",
    "ReleaseError",
    "ask_interpreter",
    "build_kernels",
    "build_sdist",
    "build_wheel",
    "find_interpreters",
    "ingredients",
    "tag",
]

PLATFORMS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu",
    "macosx_14_0_arm64": "aarch64-macos",
}
"""Platform tags of the wheels, and the target of `make cross` that each is built for. There are none for musl, nor for
macOS on x86-64, because torch has no wheels there."""

BUILD_REQUIREMENTS = ("nanobind==3.1.0", "scikit-build-core==1.1.2")

_ASK = """
import json, platform, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "plain": platform.python_implementation() == "CPython" and not sysconfig.get_config_var("Py_GIL_DISABLED"),
    "include": sysconfig.get_path("include"),
    "pyconfig": sysconfig.get_config_h_filename(),
}))
"""


class ReleaseError(Exception):
    """Says why there is no release, for the person who makes it."""


@dataclass(frozen=True)
class Abi:
    """What a wheel needs of the Python that installs it."""

    python: str  # the tag of its version: cp312
    abi: str  # cp311: only that version; abi3: its version and every later one

    def builds_with(self, version: tuple[int, int]) -> bool:
        """Whether the headers of a Python of this version can be built against."""
        own = (int(self.python[2]), int(self.python[3:]))
        return version >= own if self.abi == "abi3" else version == own


ABIS = (Abi("cp311", "cp311"), Abi("cp312", "abi3"))


@dataclass(frozen=True)
class Interpreter:
    """A CPython on this machine, with its headers."""

    command: str
    version: tuple[int, int]
    include: Path
    pyconfig: Path


def tag(abi: Abi, platform: str) -> str:
    """Return the tag of a wheel: cp312-abi3-manylinux_2_28_x86_64."""
    return f"{abi.python}-{abi.abi}-{platform}"


def find_interpreters(commands: list[str]) -> dict[Abi, Interpreter]:
    """Find, for each ABI, the first of `commands` that can build for it.

    Raises:
        ReleaseError: there is none, or its headers are missing.
    """
    there = [found for command in commands if (found := ask_interpreter(command))]
    chosen = {abi: next((each for each in there if abi.builds_with(each.version)), None) for abi in ABIS}
    missing = [abi for abi, interpreter in chosen.items() if interpreter is None]
    if missing:
        wanted = " and ".join(f"a CPython {_needs(abi)}" for abi in missing)
        names = ", ".join(f"{abi.python}-{abi.abi}" for abi in missing)
        raise ReleaseError(
            f"{wanted} with its headers is needed, for the wheels {names}. "
            f'Tried: {", ".join(commands)}. Name them: make dist PYTHONS="/path/to/python3.11 /path/to/python3.12"'
        )
    return {abi: interpreter for abi, interpreter in chosen.items() if interpreter is not None}


def _needs(abi: Abi) -> str:
    version = f"{abi.python[2]}.{abi.python[3:]}"
    return f"{version} or newer" if abi.abi == "abi3" else version


def ask_interpreter(command: str) -> Interpreter | None:
    """Ask a Python about itself; None if it does not run, is no plain CPython or lacks headers."""
    program = shutil.which(command)
    if program is None:
        return None
    done = subprocess.run([program, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:  # pyenv has commands even for versions that are not selected, which then fail
        return None
    said = json.loads(done.stdout)
    include = Path(said["include"])
    if not said["plain"] or not (include / "Python.h").is_file():
        return None
    return Interpreter(program, tuple(said["version"]), include, Path(said["pyconfig"]))


def build_sdist(root: Path, folder: Path, output: Path) -> tuple[Path, Path]:
    """Build the source archive of a checkout; returns it, and the folder where it is unpacked to build wheels from.

    Raises:
        ReleaseError: the archive could not be built.
    """
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(output), str(root)]
    _run(command, folder / "sdist.log", {})
    archive = max(output.glob("penstock-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    unpacked = folder / "source"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return archive, source


def build_kernels(source: Path, platform: str, folder: Path) -> Path:
    """Build the kernels of an unpacked source archive for a platform, as an archive of objects.

    Takes minutes, or no time if they were built from the same ingredients before.
    """
    work, made_of = folder / platform, ingredients(source / "native", platform)
    kernels, label = work / "libpenstock_kernels.a", work / "made-of"
    if kernels.exists() and label.exists() and label.read_text(encoding="ascii") == made_of:
        return kernels
    shutil.rmtree(work, ignore_errors=True)
    built = cross.build(PLATFORMS[platform], source / "native", work, "penstock_kernels")
    label.write_text(made_of, encoding="ascii")
    return built


def ingredients(native: Path, platform: str) -> str:
    """Return a digest of what compiled kernels depend on: sources, with their options, target and compiler."""
    digest = hashlib.sha256(f"{cross.TARGETS[PLATFORMS[platform]]} {version('ziglang')}".encode())
    for path in sorted(path for path in native.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"\0{path.relative_to(native)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def build_wheel(
    source: Path, abi: Abi, interpreter: Interpreter, platform: str, kernels: Path, folder: Path, output: Path
) -> Path:
    """Build the wheel of an unpacked source archive for one ABI and platform.

    Raises:
        ReleaseError: the wheel could not be built; the message ends with what the compiler said.
    """
    name = tag(abi, platform)
    work = folder / name
    shutil.rmtree(work, ignore_errors=True)
    python = _environment(interpreter, folder)
    target = PLATFORMS[platform]
    options = cross.cmake_options(target, work, _headers(interpreter, folder))
    options["SKBUILD_SOABI"] = "abi3" if abi.abi == "abi3" else _soabi(abi, target)
    options["PENSTOCK_KERNELS"] = str(kernels)
    settings = {f"cmake.define.{key}": value for key, value in options.items()}
    settings |= {"wheel.tags": name, "build-dir": str(work / "cmake"), "build.targets": "_native"}
    if abi.abi == "abi3":
        settings["wheel.py-api"] = abi.python
        # nanobind expects it from Python.h, which does not include it for a stable ABI, nor does clang's C++ library.
        settings["cmake.define.CMAKE_CXX_FLAGS"] = "-include stdio.h"
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "wheel", "--verbose", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(output), str(source)]
    for key, value in settings.items():
        command += ["--config-settings", f"{key}={value}"]
    log = folder / f"{name}.log"
    _run(command, log, cross.zig_cache())
    # Without a working compiler the package builds anyway, without its kernels: a release must not.
    if "Built WITHOUT the compiled kernels" in log.read_text(encoding="utf-8", errors="replace"):
        raise ReleaseError(f"the kernels of {name} did not compile; {_end_of(log)}")
    return next(output.glob(f"penstock-*-{name}.whl"))


def _soabi(abi: Abi, target: str) -> str:
    system = cross.TARGETS[target]
    return f"cpython-{abi.python[2:]}-" + ("darwin" if system.system == "Darwin" else target)


def _environment(interpreter: Interpreter, folder: Path) -> Path:
    """Make an environment that builds wheels for a Python; cmake, ninja and compiler are those of `make cross`."""
    venv = folder / "python{}.{}".format(*interpreter.version)
    python = venv / "bin" / "python"
    stamp = venv / ".installed"
    if not stamp.exists():
        shutil.rmtree(venv, ignore_errors=True)
        log = folder / f"{venv.name}.log"
        _run([interpreter.command, "-m", "venv", str(venv)], log, {})
        _run([str(python), "-m", "pip", "--disable-pip-version-check", "install", *BUILD_REQUIREMENTS], log, {})
        stamp.touch()
    return python


def _headers(interpreter: Interpreter, folder: Path) -> Path:
    """Copy a Python's headers, usable for every 64-bit processor: Debian's pyconfig.h includes one per processor."""
    headers = folder / "include{}.{}".format(*interpreter.version)
    if not headers.exists():
        shutil.copytree(interpreter.include, headers)
        (headers / "pyconfig.h").unlink()
        shutil.copyfile(interpreter.pyconfig, headers / "pyconfig.h")
    return headers


def _run(command: list[str], log: Path, variables: dict[str, str]) -> None:
    """Run a command with its output in a file.

    Raises:
        ReleaseError: the command failed; the message ends with the end of the output.
    """
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | variables | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:4])} ... failed; {_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    worst = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)][:10]
    return f"{log} ends with:\n" + "\n".join([*worst, "...", *lines[-15:]])
