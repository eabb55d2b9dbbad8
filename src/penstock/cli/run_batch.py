"""`penstock run-batch`: an OpenAI batch file in, its answers out."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import NoReturn

import click
from tqdm import tqdm

from penstock.cli.fallback import tell_torch_computes
from penstock.cli.options import build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.cli.targets import writable
from penstock.contract.config import EngineConfig
from penstock.imports import lasting_imports

__all__ = ["command"]


@click.command("run-batch", cls=SectionedCommand)
@click.option(
    "--input",
    "-i",
    "source",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    required=True,
    help='OpenAI batch file: JSON lines with "custom_id", "method", "url" and "body".',
)
@click.option(
    "--output",
    "-o",
    "results",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    required=True,
    help="File for answers, one JSON line each, written as they finish. Lines already answered there are skipped.",
)
@click.option(
    "--errors",
    "-e",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    help="File for the answers of lines that failed; by default the --output file.",
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Most lines in flight at once: enough to keep every slot busy. Memory grows with this, not with the file.",
)
@config_options(
    EngineConfig, leave_out=frozenset({"model", "lora_dir"}), defaults={"step_target_ms": 0}
)  # no caller waits for single tokens here
@click.pass_context
def command(
    context: click.Context,
    /,
    source: Path,
    results: Path,
    errors: Path | None,
    max_in_flight: int,
    **_: object,
) -> None:
    """Answer every line of a batch file with MODEL, as its HTTP server would; run again to resume after a stop."""
    (config,) = build_configs(context, EngineConfig)
    with lasting_imports():
        from penstock.app import local_application  # imports torch: too slow for --help
        from penstock.llm.batch_file import BatchFiles, count_lines, read_answered, run_lines
        from penstock.server.http.in_process import post
        from penstock.weights.locate import default_cache_dir

    files = BatchFiles(source, results, errors or results)
    total = count_lines(source)
    read_answered(files)  # report a file that is not ours before the model is loaded
    tell_torch_computes(config.device)
    with (
        local_application(config, default_cache_dir(os.environ), partial(click.echo, err=True)) as app,
        tqdm(total=total, desc="Answering", unit="line") as bar,
    ):
        counts = asyncio.run(run_lines(files, partial(post, app), max_in_flight, partial(_advance, bar)))
    click.echo(f"{counts.answered} answered, {counts.failed} failed, {counts.skipped} were answered before", err=True)


def _advance(bar: tqdm[NoReturn]) -> None:
    bar.update()
