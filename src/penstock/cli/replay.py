"""`penstock replay`: a recorded run on today's scheduler, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from penstock.cli.bench_report import json_option, report
from penstock.contract.errors import ConfigError
from penstock.contract.scheduler_config import POLICIES, SchedulerConfig
from penstock.core.replaying import replay
from penstock.foresight.files import names_file, read_lines

__all__ = ["command"]

DIFFERS = 1
"""The exit code if a plan differs."""


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--policy", type=click.Choice(POLICIES), help="Simulate with this order of admission.")
@click.option("--num-blocks", type=click.IntRange(1), help="Simulate with this many KV blocks.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Simulate with this many sequences at once.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Simulate with this many tokens in a step.")
@click.option("--step-target-ms", type=click.IntRange(0), help="Simulate with this step target in ms; 0: none.")
@click.option("--no-prefix-caching", is_flag=True, help="Simulate without a prefix cache.")
@click.option("--max-bypasses", type=click.IntRange(0), help="Simulate with this many admissions past a waiting head.")
@click.option(
    "--simulate", is_flag=True, help="Simulate with the record's own options, to see how well simulation matches it."
)
@click.option(
    "--seeds", type=click.IntRange(1), default=3, show_default=True, help="Simulations with each set of options."
)
@json_option
def command(
    file: Path, no_prefix_caching: bool, simulate: bool, seeds: int, target: Path | None, **options: Any
) -> None:
    """Feed a record of `penstock serve --record FILE` to today's scheduler again, without its model.

    Every plan must be the same as the recorded one, to the last block. The first that is not is shown, and the exit
    code is 1. FILE may be compressed with gzip; a record of another version is refused.

    With an option, the recorded requests are sent to a simulated engine that has this option: the scheduler that
    serves, steps that take as long as the recorded ones, answers of the recorded lengths. The report shows which
    requests and tenants gain or lose, against the same simulation without the option; --json keeps it.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    if no_prefix_caching:
        chosen["prefix_caching"] = False
    if chosen or simulate:
        _simulate(file, chosen, seeds, target)
        return
    if target is not None:
        raise ConfigError("json", "is of simulations: name an option, or --simulate")
    with _progress(file) as advance, names_file(file):
        replayed = replay(read_lines(file, advance))
    over = f" over {replayed.seconds:.0f} s" if replayed.seconds else ""
    click.echo(f"{replayed.requests} requests, {replayed.tokens} tokens drawn{over}")
    click.echo(replayed.explain())
    if not replayed.same:
        raise SystemExit(DIFFERS)


def _simulate(file: Path, chosen: dict[str, Any], seeds: int, target: Path | None) -> None:
    """Compare the recorded day with one that has the chosen options."""
    from penstock.foresight.comparing import compare, comparison_record, comparison_table  # numpy is slow to import
    from penstock.foresight.recorded import read_record

    with _progress(file, "Reading") as advance, names_file(file):
        run = read_record(read_lines(file, advance))
    config: SchedulerConfig = replace(run.config, **chosen)
    days = 2 * seeds
    with tqdm(desc="Simulating", unit="request", total=days * len(run.arrivals), leave=False, disable=None) as bar:
        compared = compare(run, config, seeds, bar.update)
    record = comparison_record(compared) | {"file": str(file), "seeds": seeds}
    report(comparison_table(record), record, target)


@contextmanager
def _progress(file: Path, doing: str = "Replaying") -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, if that is a terminal; yields the function that advances it by bytes of the file."""
    whole = file.stat().st_size
    with tqdm(desc=doing, unit="B", unit_scale=True, total=whole, leave=False, disable=None) as bar:
        yield bar.update
