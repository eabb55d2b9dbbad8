"""`python bench/compare.py`: Penstock and other engines on one model, in turns, each at its best flags.

`peers.comparison` decides how they are measured; `peers.contenders`, which engines take part and how each is run.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import click

from peers import plot
from peers.comparison import TRIALS, compare, compare_record, compare_table
from peers.contenders import PEERS, Absent, Contender, Setting, find_peer, penstock_contender
from peers.install import ISAS, install_peer, read_sources
from peers.process import FROM_FOLDER
from penstock.bench.limits import limits_line
from penstock.bench.machine import load_average, provenance
from penstock.bench.plotting import SUFFIXES, check_suffix, plotting
from penstock.bench.variants import VARIANTS, variant_name
from penstock.cli import run
from penstock.cli.bench import LEFT_OUT, LIMITS, REPEATS, STREAMS, measured_limits
from penstock.cli.bench_report import json_option, report
from penstock.cli.options import build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.cli.targets import writable
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError

__all__ = ["command"]

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@click.command("compare", cls=SectionedCommand)
@click.option(
    "--peer",
    "names",
    multiple=True,
    help=f"An engine to compare with: {', '.join(PEERS)}; llama.cpp:Q8_0, openvino-genai:int8 and the like"
    " convert the model first. May be given several times; by default all that are installed.",
)
@click.option(
    "--ours",
    "variants",
    multiple=True,
    type=click.Choice(VARIANTS),
    help="A --quantization with which Penstock takes part, instead of one run with --quantization; with :int8-kv it has"
    " a KV cache in int8. May be given several times.",
)
@click.option(
    "--peers-dir", type=click.Path(path_type=Path, file_okay=False), help="Where peers are; by default in the cache."
)
@click.option("--install", is_flag=True, help="Install the peers that are missing first (pip; llama.cpp needs cmake).")
@click.option(
    "--peer-source",
    "given_sources",
    multiple=True,
    metavar="ENGINE=FOLDER",
    help=f"With --install: the source of a peer that is not fetched, {' or '.join(FROM_FOLDER)}. It is built in build"
    " under that folder.",
)
@click.option(
    "--isa",
    type=click.Choice([each for each in ISAS if each]),
    help="Measure as on a processor that has no more: our kernels for it, peers built for it (in a folder of its name"
    " under --peers-dir).",
)
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
    help=f"Draw the result here; the suffix decides the format: {', '.join(SUFFIXES)}.",
)
@config_options(EngineConfig, leave_out=LEFT_OUT | {"record"})
@click.pass_context
def command(
    context: click.Context,
    /,
    names: tuple[str, ...],
    variants: tuple[str, ...],
    peers_dir: Path | None,
    install: bool,
    given_sources: tuple[str, ...],
    isa: str | None,
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
        check_suffix(picture)
    sources = read_sources(given_sources)
    if sources and not install:
        raise ConfigError("peer-source", "builds a peer only with --install")
    pyplot = plotting() if picture is not None else None
    from penstock.exec.device import compute_threads, set_torch_threads
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    cache = default_cache_dir(os.environ)
    folder = (peers_dir or cache / "peers") / (isa or "")
    if isa:
        os.environ["PENSTOCK_ISA"] = isa  # for this process, which measures limits, and for ours that it starts
    model = pull(config.model, cache, show_progress=True)
    setting = Setting(model, prompt_tokens, new_tokens, streams, compute_threads(config.threads))
    if install:
        wanted = [each for each in PEERS if each in sources or (each not in FROM_FOLDER and not isa)]
        for name in names or wanted:
            install_peer(name, folder, _say, sources, isa or "")
    found = _find_peers(names, folder, model)
    contenders = _our_contenders(config, variants, model)
    contenders += [each for each in found if isinstance(each, Contender)]
    head = provenance()
    set_torch_threads(setting.threads, packed=True)
    limits = measured_limits(setting.threads) if with_limits else None
    comparison = compare(contenders, setting, repeats, _say, trials=trials)
    if limits is not None and (limits := measured_limits(setting.threads, limits)) is not None:
        _say(limits_line(limits))
    record = head | {"kind": "compare", "isa": isa or ""} | compare_record(comparison, limits)
    record["absent"] |= {each.name: each.reason for each in found if isinstance(each, Absent)}
    record["load_average_after"] = load_average()
    report(compare_table(record), record, target)
    if picture is not None and pyplot is not None:
        plot.draw(record, picture, pyplot)


def _our_contenders(config: EngineConfig, variants: tuple[str, ...], model: Path) -> list[Contender]:
    """Penstock in each variant, named by it: `penstock (bf16)`, `penstock (file:int8-kv)`, ...

    Raises:
        SetupError: the model's files cannot be used, or the machine does not allow a variant.
    """
    from penstock.bench.quality import possible_variants
    from penstock.exec.device import good_dtypes, open_backend, resolve_device, resolve_dtype
    from penstock.models import gguf_dialect
    from penstock.weights.files import open_model

    device = resolve_device(config.device)
    good = good_dtypes(device, open_backend(device, threads=1).exact)
    files = open_model(model, gguf_dialect)
    dtype = str(resolve_dtype(config.dtype, files.stored_dtype, device, good)).removeprefix("torch.")
    return [
        penstock_contender(_engine_flags(each), f"penstock ({variant_name(each, plain=SHORT_DTYPES[dtype])})")
        for each in possible_variants(config, files, variants or (config.quantization,))
    ]


def _find_peers(names: tuple[str, ...], folder: Path, model: Path) -> list[Contender | Absent]:
    """The peers asked for, which must all be installed; if none was asked for, every peer, installed or absent."""
    found = [find_peer(name, folder, model) for name in dict.fromkeys(names or PEERS)]
    for each in found:
        if names and isinstance(each, Absent):
            raise ConfigError("peer", f"{each.name} {each.reason}")
    return found


def _engine_flags(config: EngineConfig) -> list[str]:
    """The engine's options that differ from their defaults, as flags for one of our own processes."""
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


if __name__ == "__main__":
    run(command, "python bench/compare.py")
