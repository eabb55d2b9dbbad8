"""`penstock pull`."""

from __future__ import annotations

import os

import click

from penstock.cli.sections import complete_model
from penstock.contract.config import DEFAULT_MODEL

__all__ = ["command"]


@click.command("pull")
@click.argument("model", default=DEFAULT_MODEL, metavar="[MODEL]", shell_complete=complete_model)
def command(model: str) -> None:
    """Fetch MODEL, verify it, and print where it is; quick if it is there already.

    MODEL is a name that `penstock models` lists, or org/name on the Hugging Face hub (needs the extra penstock[hub]);
    by default smollm2-135m-instruct. An interrupted download from the hub keeps what has arrived, and the next pull
    resumes there.
    """
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    click.echo(str(pull(model, default_cache_dir(os.environ), show_progress=True)))
