"""`penstock bench speculate`: what guesses save, task by task."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from tqdm import tqdm

from penstock.bench.machine import load_average, provenance
from penstock.bench.speculation import TaskRun, run_both, speculation_table, summary
from penstock.bench.speculation_tasks import TASKS
from penstock.cli.bench_report import json_only, json_option, report
from penstock.cli.fallback import tell_torch_computes
from penstock.cli.options import ADAPTER_OPTIONS, NOT_OFFLINE, build_configs, config_options, library_options
from penstock.cli.sections import SectionedCommand
from penstock.contract.config import EngineConfig
from penstock.imports import lasting_imports

__all__ = ["command"]

_LEFT_OUT = (
    NOT_OFFLINE | ADAPTER_OPTIONS | {"model", "speculate", "tool_call_parser", "reasoning_parser", "generation_config"}
)


@click.command("speculate", cls=SectionedCommand)
@click.option(
    "--streams",
    "streams",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 8),
    show_default=True,
    help="Requests at once. May be given several times.",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each task; medians are reported."
)
@json_option
@config_options(EngineConfig, leave_out=_LEFT_OUT)
@click.pass_context
def command(
    context: click.Context, /, streams: tuple[int, ...], repeats: int, target: Path | None, **_options: object
) -> None:
    """Measure what guesses save with MODEL: five tasks with and without them, in turns, every answer compared.

    Exit code 1 if an answer differs.
    """
    (config,) = build_configs(context, EngineConfig)
    head = provenance()
    with lasting_imports():
        from penstock.llm.offline import LLM

    tell_torch_computes(config.device)
    options = library_options(config) | {"generation_config": "none"}
    without = {"speculate": False, "draft_model": ""}
    runs: dict[tuple[int, str], list[tuple[TaskRun, TaskRun]]] = {}
    total = repeats * len(streams) * len(TASKS)
    with tqdm(total=total, desc="Measuring", unit="run", leave=False, disable=None) as bar:
        for _ in range(repeats):
            for count in streams:
                # New engines each time: they remember no earlier answers, and where their memory lies affects times.
                with LLM(**options | without) as plain, LLM(**options) as guessing:
                    for task in TASKS:
                        pair = run_both(plain, guessing, task, count, plain.card.vocab_size)
                        runs.setdefault((count, task.name), []).append(pair)
                        bar.update()
    rows = [summary(name, count, *zip(*pairs, strict=True)) for (count, name), pairs in runs.items()]
    click.echo("every answer is the same with guesses and without", err=json_only(target))
    record = head | {"kind": "speculate", "config": asdict(config), "rows": rows, "load_average_after": load_average()}
    report(speculation_table(rows), record, target)
