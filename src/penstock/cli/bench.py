"""`penstock bench`: measurements that anyone can repeat. `penstock.bench` decides how they are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from penstock.bench import batch
from penstock.bench.limits import Limits, limits_line, shares
from penstock.bench.machine import load_average, provenance
from penstock.cli import bench_kernels, bench_quality, bench_serve, bench_speculate
from penstock.cli.bench_report import json_only, json_option, report
from penstock.cli.fallback import tell_torch_computes
from penstock.cli.options import ADAPTER_OPTIONS, NOT_OFFLINE, build_configs, config_options, library_options
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.imports import lasting_imports

__all__ = ["LEFT_OUT", "LIMITS", "REPEATS", "STREAMS", "command", "measured_limits"]


def _several(flag: str, name: str, default: tuple[int, ...], help_text: str, least: int = 1) -> Callable[[Any], Any]:
    help_text += " May be given several times."
    kind = click.IntRange(least)
    return click.option(flag, name, multiple=True, type=kind, default=default, show_default=True, help=help_text)


# Engine options without effect in a measurement: prompts are token ids, all of one rank, and none is queued.
LEFT_OUT = (
    NOT_OFFLINE
    | ADAPTER_OPTIONS
    | {"model", "tool_call_parser", "reasoning_parser", "chat_template", "generation_config"}
)
STREAMS = _several("--streams", "streams", (1, 8, 32), "Requests at once.")
REPEATS = click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each size; medians are reported."
)
LIMITS = click.option(
    "--limits/--no-limits",
    "with_limits",
    default=True,
    show_default=True,
    help="Also measure what the machine can do at best (about a second), and report the share that was reached.",
)


@click.group("bench", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Measure this machine: offline throughput, a server under load, single kernels, or what quantisation costs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


command.add_command(bench_quality.command)
command.add_command(bench_serve.command)
command.add_command(bench_kernels.command)
command.add_command(bench_speculate.command)


@command.command("batch", cls=SectionedCommand)
@STREAMS
@_several("--prompt-tokens", "prompt_tokens", (128,), "Length of each prompt.")
@_several("--new-tokens", "new_tokens", (128,), "Tokens generated for each prompt.", least=2)
@REPEATS
@LIMITS
@json_option
@config_options(EngineConfig, leave_out=LEFT_OUT)
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
    with lasting_imports():  # as in the server: garbage collection over torch's objects would be measured too
        from penstock.exec.device import compute_threads
        from penstock.llm.offline import LLM

    tell_torch_computes(config.device)
    with LLM(**library_options(config) | {"generation_config": "none"}) as llm:
        for line in llm.report:
            click.echo(line, err=json_only(target))
        kv = llm.scheduler.config
        batch.check_fits(loads, kv.max_num_seqs, llm.card.max_model_len, kv.num_blocks * kv.block_size)
        threads = compute_threads(config.threads)
        limits = measured_limits(threads) if with_limits else None
        rows = []
        with tqdm(total=len(loads) * repeats, desc="Measuring", unit="run", leave=False, disable=None) as bar:
            for load in loads:
                batch.warm_up(llm, load, llm.card.vocab_size)
                runs = []
                for repeat in range(repeats):
                    runs.append(batch.measure(llm, load, llm.card.vocab_size, seed=repeat))
                    bar.update()
                rows.append(batch.summary(runs))
        costs = [batch.costs(load, llm.cost) for load in loads]
        if limits is not None and (limits := measured_limits(threads, limits)) is not None:
            rows = [row | shares(row, each, limits) for row, each in zip(rows, costs, strict=True)]
            click.echo(limits_line(limits), err=json_only(target))
    record = head | {"kind": "batch", "config": asdict(config)}
    rows = [row | {"costs": {step: asdict(each[step]) for step in each}} for row, each in zip(rows, costs, strict=True)]
    record |= {"limits": limits and asdict(limits), "rows": rows, "load_average_after": load_average()}
    report(batch.batch_table(rows), record, target)


def measured_limits(threads: int, earlier: Limits | None = None) -> Limits | None:
    """The machine's limits, at least as high as `earlier`; None without compiled kernels.

    Measured with the instruction set that our other processes use too, so that the limits apply to their kernels.
    """
    from penstock.bench.kernels import measure_limits
    from penstock.exec.device import open_backend, resolve_device
    from penstock.kernels.cpu_backend import CpuBackend

    backend = open_backend(resolve_device("cpu"), threads, os.environ.get("PENSTOCK_ISA", ""))
    if not isinstance(backend, CpuBackend):
        return None
    limits = measure_limits(backend)
    return limits if earlier is None else earlier.or_better(limits)
