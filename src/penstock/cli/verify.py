"""`penstock verify`: whether this machine gives the same answers, whatever else it is doing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tqdm import tqdm

from penstock.bench.machine import load_average, provenance
from penstock.cli.options import NOT_OFFLINE, build_configs, config_options
from penstock.cli.sections import SectionedCommand
from penstock.cli.targets import writable, write_text
from penstock.cli.verify_certificate import CERTIFIED_OPTIONS, verify_certificates
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.imports import lasting_imports

if TYPE_CHECKING:
    from penstock.verify import Report

__all__ = ["command"]

NOT_PROVED = 1

# Engine options that do not matter to a verification: names, queues and parsers of answers.
_LEFT_OUT = (NOT_OFFLINE - {"tensor_parallel"}) | {
    "model",
    "max_model_len",
    "tool_call_parser",
    "reasoning_parser",
    "tokenizer",
    "chat_template",
    "generation_config",
    "record",
}


@click.command("verify", cls=SectionedCommand)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Number of random requests.")
@click.option("--schedules", type=click.IntRange(1), default=8, show_default=True, help="Ways to run them together.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the requests and schedules.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=320,
    show_default=True,
    help="Tokens in the longest prompt, or as many as the model's context allows.",
)
@click.option("--new-tokens", type=click.IntRange(1), default=32, show_default=True, help="Most tokens per answer.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    default="penstock-verify.jsonl",
    show_default=True,
    help="File for the record of the first schedule that is not exact.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=writable,
    help="Also write the results to this file, as JSON.",
)
@click.option(
    "--certificate",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Instead, compute the certified answers in this file again, and report whether they are equal.",
)
@click.option("--fail-fast", is_flag=True, help="Stop after the first schedule that is not exact.")
@config_options(EngineConfig, leave_out=_LEFT_OUT)
@click.pass_context
def command(
    context: click.Context,
    /,
    requests: int,
    schedules: int,
    seed: int,
    prompt_tokens: int,
    new_tokens: int,
    trace: Path,
    json_path: Path | None,
    certificate: Path | None,
    fail_fast: bool,
    **_: object,
) -> None:
    """Prove that MODEL's answers do not depend on batch, chunks, cache, guesses, preemption or threads, bit for bit.

    Random requests run alone, then together by many schedules; every token and log probability must be the same. The
    first schedule has the sizes given here, as `penstock serve` would use them. With adapters (--lora), requests use no
    adapter and each adapter in turn. Exit code 1 if anything differs, or if a schedule that was built to preempt did
    not.

    With --certificate, one MODEL, in the form that the certificates name, computes each certified answer again, alone.
    Exit code 1 if an answer differs or was changed; 3 if none does, but other instructions or another release computed
    one.
    """
    (config,) = build_configs(context, EngineConfig)
    if certificate is not None:
        _refuse_beside_certificate(context)
        verify_certificates(certificate, config)
        return
    head = provenance()
    with lasting_imports():
        from penstock.loading import find_model  # imports torch: too slow for --help
        from penstock.rank_loading import load_on_ranks
        from penstock.verify import Budget, ScheduleCrashed, open_target, verify

    budget = Budget(requests, schedules, seed, prompt_tokens, new_tokens)
    loaded = load_on_ranks(config, find_model(config), click.echo)
    click.echo(f"verifies         {requests} requests, alone and by {schedules} schedules")
    try:
        with open_target(loaded, config, announce=click.echo) as target, progress_bar() as show:
            report = verify(target, budget, config, show, fail_fast=fail_fast)
    except ScheduleCrashed as crash:
        write_trace(trace, crash.index, crash.trace)
        raise
    click.echo(report.table())
    where = keep_trace(report, trace)
    if json_path is not None:
        record = head | {
            "kind": "verify",
            "config": asdict(config),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "isa": loaded.isa,
            **report.as_json(),
            "trace": where,
            "load_average_after": load_average(),
        }
        write_text(json_path, json.dumps(record, indent=2) + "\n", "--json")
    click.echo(report.coverage_line())
    click.echo(report.verdict_line())
    if not report.proved:
        raise SystemExit(NOT_PROVED)


def _refuse_beside_certificate(context: click.Context) -> None:
    """Refuse options that would do nothing beside --certificate.

    Raises:
        ConfigError: naming the first that was given.
    """
    mine = {*("requests", "schedules", "seed", "prompt_tokens", "new_tokens", "trace", "json_path", "fail_fast")}
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if given and name in CERTIFIED_OPTIONS:
            raise ConfigError(parameter.opts[0], "is what the certificate says it is; leave it out")
        if given and name in mine:
            raise ConfigError(parameter.opts[0], "means nothing beside --certificate")


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal; yields the function that advances it."""
    with tqdm(desc="Verifying", unit="request", leave=False, disable=None) as bar:

        def show(done: int, whole: int) -> None:
            bar.total = whole
            bar.update(done - bar.n)

        yield show


def keep_trace(report: Report, path: Path) -> str | None:
    """Report the first difference and write the record of its schedule; return the record's path."""
    failed = report.first_failed
    if failed is None or failed.first is None:
        return None
    click.echo(f"first mismatch: schedule {failed.schedule.index}, {failed.first.explain()}")
    write_trace(path, failed.schedule.index, failed.trace)
    return str(path)


def write_trace(path: Path, schedule: int, lines: Sequence[str]) -> None:
    """Write the record of a schedule, and report where it is."""
    write_text(path, "".join(f"{line}\n" for line in lines), "--trace")
    click.echo(f"trace of schedule {schedule}: {path}")
