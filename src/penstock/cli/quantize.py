"""`penstock quantize`: a model in another form, as a GGUF file or as a directory of safetensors."""

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
    from penstock.quantizing import DirectoryPlan, Plan

__all__ = ["command"]

GGUF_FORMS = (
    *("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("BF16", "F16", "F32"),
)
DIRECTORY_FORMS = ("INT4_G128", "INT4_G32", "INT8", "BF16", "F16", "F32")
"""The names in `penstock.quantizing`, which imports torch."""


@click.command("quantize")
@click.argument("model", metavar="MODEL", shell_complete=complete_model)
@click.argument("target", type=click.Path(path_type=Path), metavar="TARGET")
@click.option(
    "--form",
    type=click.Choice(tuple(dict.fromkeys((*GGUF_FORMS, *DIRECTORY_FORMS))), case_sensitive=False),
    required=True,
    help="INT4 and INT8 are for directories. Q4_K_M, Q5_K_M and similar forms are mixtures: the matrices whose"
    " quantisation costs most quality get more bits.",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it is an existing file; a directory is never replaced.")
def command(model: str, target: Path, form: str, force: bool) -> None:
    """Write MODEL, with settings, tokenizer and chat template, in another form, ready for penstock serve TARGET.

    TARGET is a GGUF file if its name ends in .gguf, else a new or empty directory for safetensors. MODEL is a name that
    `penstock models` lists, a GGUF file, or a directory in Hugging Face layout; a directory can be written only from a
    directory. Anything that the format cannot express is refused by name.

    llama.cpp's rule for the form, without an importance matrix, chooses the kind of blocks of each tensor in a GGUF
    file. INT4_G128, INT4_G32 and INT8 are the integers of compressed-tensors, with a scale for 128 inputs, 32 inputs
    or a row; embeddings, heads and routers stay as they are.
    """
    _check_target(target, form, force=force)
    from penstock.loading import find_model  # imports torch: too slow for --help
    from penstock.quantizing import Plan, plan_directory, plan_file, write_directory, write_file
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.progress import byte_bar
    from penstock.weights.unfinished import passing_name

    files = find_model(EngineConfig(model=model), default_cache_dir(os.environ))
    if target.exists() and target.samefile(files.path):
        raise ConfigError("TARGET", f"{target} is MODEL itself; name another")
    plan = plan_file(files, form) if _is_file(target) else plan_directory(files, form)
    for remark in plan.remarks:
        click.echo(f"{files.path}: {remark}", err=True)
    with leaves_nothing(passing_name(target)), byte_bar(f"Writing {form}", plan.bytes, show=True) as bar:
        if isinstance(plan, Plan):
            write_file(plan, target, bar.update)
        else:
            write_directory(plan, target, bar.update)
    click.echo(f"{_share(plan, files.num_weights)}", err=True)
    click.echo(str(target))


def _is_file(target: Path) -> bool:
    return target.suffix.lower() == ".gguf"


def _check_target(target: Path, form: str, *, force: bool) -> None:
    if form not in (GGUF_FORMS if _is_file(target) else DIRECTORY_FORMS):
        raise ConfigError("--form", _OTHER_FORMAT[_is_file(target)].format(form=form, target=target))
    if not target.parent.is_dir():
        raise ConfigError("TARGET", f"{target} cannot be written: there is no folder {target.parent}")
    if _is_file(target):
        if target.exists() and not force:
            raise ConfigError("TARGET", f"{target} exists already; --force replaces it")
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("TARGET", f"{target} exists already; name a new directory, nothing is overwritten")


_OTHER_FORMAT = {
    True: f"{{form}} is a form of directories, and {{target}} is a GGUF file, which has {', '.join(GGUF_FORMS)}",
    False: f"{{form}} is a form of GGUF files, whose names end in .gguf; {{target}} is a directory, which has"
    f" {', '.join(DIRECTORY_FORMS)}",
}


def _share(plan: Plan | DirectoryPlan, weights: int) -> str:
    kinds = ", ".join(f"{kind} {size / plan.bytes:.0%}" for kind, size in plan.kinds.items())
    return f"{plan.bytes / 1e6:.1f} MB of tensors, {8 * plan.bytes / weights:.2f} bits a weight: {kinds}"
