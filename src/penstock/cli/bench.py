"""`penstock bench`: measurements that anyone can repeat on his own machine. How is decided in the room `bench`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from penstock.bench import batch, peers, plot
from penstock.bench.compare import TRIALS, compare, compare_record, compare_table
from penstock.bench.forms import FORMS, form_name
from penstock.bench.limits import Limits, limits_line, shares
from penstock.bench.machine import load_average, provenance
from penstock.bench.peer_install import install_peer
from penstock.cli import bench_kernels, bench_quality, bench_serve
from penstock.cli.bench_report import json_only, json_option, report
from penstock.cli.options import NOT_OFFLINE, build_configs, config_options, library_options
from penstock.cli.sections import SectionedCommand
from penstock.cli.targets import writable
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError

__all__ = ["command"]


def _several(flag: str, name: str, default: tuple[int, ...], help_text: str, least: int = 1) -> Callable[[Any], Any]:
    help_text += " May be given several times."
    kind = click.IntRange(least)
    return click.option(flag, name, multiple=True, type=kind, default=default, show_default=True, help=help_text)


# Options of the engine that a measurement has no use for: prompts are token ids, all of one rank, and none is queued.
_LEFT_OUT = NOT_OFFLINE | {"model", "tool_call_parser", "reasoning_parser"}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STREAMS = _several("--streams", "streams", (1, 8, 32), "Requests at once.")
REPEATS = click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each size; medians are reported."
)
LIMITS = click.option(
    "--limits/--no-limits",
    "with_limits",
    default=True,
    show_default=True,
    help="Measure what the machine can do at best too (about a second), and say what share of it was reached.",
)


@click.group("bench", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Measure this machine: offline rates, a server under load, other engines, and what quantisation costs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


command.add_command(bench_quality.command)
command.add_command(bench_serve.command)
command.add_command(bench_kernels.command)


@command.command("batch", cls=SectionedCommand)
@STREAMS
@_several("--prompt-tokens", "prompt_tokens", (128,), "Length of each prompt.")
@_several("--new-tokens", "new_tokens", (128,), "Tokens generated for each.", least=2)
@REPEATS
@LIMITS
@json_option
@config_options(EngineConfig, leave_out=_LEFT_OUT)
@click.pass_context
def batch_command(
    context: click.Context,
    /,
    streams: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    new_tokens: tuple[int, ...],
    repeats: int,
    with_limits: bool,
    target: Path | None,
    **_: object,
) -> None:
    """Measure MODEL's offline throughput: prefill and decode rates for every combination of sizes."""
    (config,) = build_configs(context, EngineConfig)
    loads = batch.grid(prompt_tokens, new_tokens, streams)
    head = provenance()
    from penstock.llm.offline import LLM  # brings torch in: not for --help

    with LLM(**library_options(config)) as llm:
        for line in llm.report:
            click.echo(line, err=json_only(target))
        kv = llm.scheduler.config
        batch.check_fits(loads, kv.max_num_seqs, llm.card.max_model_len, kv.num_blocks * kv.block_size)
        limits = _measured_limits() if with_limits else None
        rows = []
        with tqdm(total=len(loads) * repeats, desc="Measuring", unit="run", leave=False, disable=None) as bar:
            for load in loads:
                batch.warm_up(llm, load, llm.card.vocab_size)
                runs = []
                for repeat in range(repeats):
                    runs.append(batch.measure(llm, load, llm.card.vocab_size, seed=repeat))
                    bar.update()
                rows.append(batch.summary(runs))
        work = llm.work
        if limits is not None and (limits := _measured_limits(limits)) is not None:
            rows = [row | shares(row, work, limits) for row in rows]
            click.echo(limits_line(limits), err=json_only(target))
    record = head | {"kind": "batch", "config": asdict(config), "work": asdict(work)}
    record |= {"limits": limits and asdict(limits), "rows": rows, "load_average_after": load_average()}
    report(batch.batch_table(rows), record, target)


@command.command("compare", cls=SectionedCommand)
@click.option(
    "--peer",
    "names",
    multiple=True,
    help=f"An engine to compare with: {', '.join(peers.PEERS)}; llama.cpp:Q8_0, openvino-genai:int8 and the like"
    " convert the model first. May be given several times; by default all that are installed.",
)
@click.option(
    "--ours",
    "forms",
    multiple=True,
    type=click.Choice(FORMS),
    help="A --quantization with which Penstock takes part, instead of one run with --quantization; with :int8-kv it has"
    " a KV cache in int8. May be given several times.",
)
@click.option(
    "--peers-dir", type=click.Path(path_type=Path, file_okay=False), help="Where peers are; by default in the cache."
)
@click.option("--install", is_flag=True, help="Install the peers that are missing first (pip; llama.cpp needs cmake).")
@STREAMS
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Length of each prompt.")
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens generated for each.")
@REPEATS
@click.option(
    "--trials", type=click.IntRange(1), default=TRIALS, show_default=True, help="Rounds of trials to choose flags by."
)
@LIMITS
@json_option
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    help=f"Draw the result here; the suffix decides the format: {', '.join(plot.SUFFIXES)}.",
)
@config_options(EngineConfig, leave_out=_LEFT_OUT | {"record"})
@click.pass_context
def compare_command(
    context: click.Context,
    /,
    names: tuple[str, ...],
    forms: tuple[str, ...],
    peers_dir: Path | None,
    install: bool,
    streams: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    trials: int,
    with_limits: bool,
    target: Path | None,
    picture: Path | None,
    **_: object,
) -> None:
    """Measure Penstock and other engines on MODEL, in turns, each at its best flags: medians, ratios, spread."""
    (config,) = build_configs(context, EngineConfig)
    if picture is not None:
        plot.check_suffix(picture)
    pyplot = plot.plotting() if picture is not None else None
    from penstock.exec.device import compute_threads, set_isa, set_threads
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    set_isa(os.environ.get("PENSTOCK_ISA", ""))  # as in each process of ours, so that limits are those of its kernels
    cache = default_cache_dir(os.environ)
    folder = peers_dir or cache / "peers"
    model = pull(config.model, cache, show_progress=True)
    setting = peers.Setting(model, prompt_tokens, new_tokens, streams, compute_threads(config.threads))
    found = _find_peers(names, folder, model, install)
    contenders = _our_contenders(config, forms, model)
    contenders += [each for each in found if isinstance(each, peers.Contender)]
    head = provenance()
    set_threads(config.threads, packed=True)
    limits = _measured_limits() if with_limits else None
    comparison = compare(contenders, setting, repeats, _say, trials=trials)
    if limits is not None and (limits := _measured_limits(limits)) is not None:
        _say(limits_line(limits))
    record = head | {"kind": "compare"} | compare_record(comparison, limits)
    record["absent"] |= {each.name: each.reason for each in found if isinstance(each, peers.Absent)}
    record["load_average_after"] = load_average()
    report(compare_table(record), record, target)
    if picture is not None and pyplot is not None:
        plot.draw(record, picture, pyplot)


def _our_contenders(config: EngineConfig, forms: tuple[str, ...], model: Path) -> list[peers.Contender]:
    """Ourselves in each form, named by it: `penstock (bf16)`, `penstock (file:int8-kv)`, ...

    Raises:
        SetupError: the model's files cannot be used, or a form cannot be had here.
    """
    from penstock.bench.quality import possible_forms
    from penstock.exec.device import good_dtypes, resolve_device, resolve_dtype
    from penstock.kernels import native
    from penstock.weights.files import open_model

    device = resolve_device(config.device)
    good = good_dtypes(device, native.available())
    files = open_model(model)
    dtype = str(resolve_dtype(config.dtype, files.stored_dtype, device, good)).removeprefix("torch.")
    return [
        peers.penstock_contender(_engine_flags(each), f"penstock ({form_name(each, plain=SHORT_DTYPES[dtype])})")
        for each in possible_forms(config, files, forms or (config.quantization,))
    ]


def _measured_limits(earlier: Limits | None = None) -> Limits | None:
    """The machine's limits, or better ones than `earlier`; None without compiled kernels."""
    from penstock.bench.kernels import measure_limits
    from penstock.kernels import native

    if not native.available():
        return None
    limits = measure_limits()
    return limits if earlier is None else earlier.or_better(limits)


def _find_peers(
    names: tuple[str, ...], folder: Path, model: Path, install: bool
) -> list[peers.Contender | peers.Absent]:
    """The peers asked for, all of which must be there; or every peer, there or not."""
    if install:
        for name in names or peers.PEERS:
            install_peer(name, folder, _say)
    found = [peers.find_peer(name, folder, model) for name in dict.fromkeys(names or peers.PEERS)]
    for each in found:
        if names and isinstance(each, peers.Absent):
            raise ConfigError("peer", f"{each.name} {each.reason}")
    return found


def _engine_flags(config: EngineConfig) -> list[str]:
    """The engine's options that are not at their default, as flags for a process of our own."""
    flags = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in ("model", "threads") or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


def _say(line: str) -> None:
    click.echo(line, err=True)
