"""`penstock quantize`: a model as a GGUF file in another form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.interrupts import leaves_nothing
from penstock.cli.sections import complete_model
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError

if TYPE_CHECKING:
    from penstock.quantizing import Plan

__all__ = ["command"]

FORMS = (
    *("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("BF16", "F16", "F32"),
)
"""As `penstock.weights.gguf_mixture` has them, which brings torch in."""


@click.command("quantize")
@click.argument("model", metavar="MODEL", shell_complete=complete_model)
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False), metavar="TARGET")
@click.option(
    "--form",
    type=click.Choice(FORMS, case_sensitive=False),
    required=True,
    help="Q4_K_M, Q5_K_M and the like are mixtures: the matrices that cost most in quality have more bits.",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it is there.")
def command(model: str, target: Path, form: str, force: bool) -> None:
    """Write MODEL as the GGUF file TARGET, with its settings, tokenizer and chat template: penstock serve TARGET.

    MODEL is a name that `penstock models` lists, a GGUF file, or a directory in Hugging Face layout. Which tensor gets
    which kind of blocks is llama.cpp's rule for the form, without an importance matrix. A directory whose settings or
    tokenizer cannot be said in GGUF is refused by name.
    """
    _check_target(target, force=force)
    from penstock.loading import find_model  # brings torch in: not for --help
    from penstock.quantizing import plan_file, write_file
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.progress import byte_bar
    from penstock.weights.unfinished import passing_name

    files = find_model(EngineConfig(model=model), default_cache_dir(os.environ))
    if target.exists() and target.samefile(files.path):
        raise ConfigError("TARGET", f"{target} is MODEL itself; name another file")
    plan = plan_file(files, form)
    for remark in plan.remarks:
        click.echo(f"{files.path}: {remark}", err=True)
    with leaves_nothing(passing_name(target)), byte_bar(f"Writing {form}", plan.bytes, show=True) as bar:
        write_file(plan, target, bar.update)
    click.echo(f"{_share(plan, files.num_weights)}", err=True)
    click.echo(str(target))


def _check_target(target: Path, *, force: bool) -> None:
    if target.suffix.lower() != ".gguf":
        raise ConfigError("TARGET", f"{target} must end in .gguf: that is how a model's file is told from others")
    if not target.parent.is_dir():
        raise ConfigError("TARGET", f"{target} cannot be written: there is no folder {target.parent}")
    if target.exists() and not force:
        raise ConfigError("TARGET", f"{target} exists already; --force replaces it")


def _share(plan: Plan, weights: int) -> str:
    kinds = ", ".join(f"{kind} {size / plan.bytes:.0%}" for kind, size in plan.kinds.items())
    return f"{plan.bytes / 1e6:.1f} MB of tensors, {8 * plan.bytes / weights:.2f} bits a weight: {kinds}"
