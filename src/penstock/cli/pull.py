"""`penstock pull`."""

from __future__ import annotations

import os

import click

from penstock.contract.config import DEFAULT_MODEL

__all__ = ["command"]


@click.command("pull")
@click.argument("model", default=DEFAULT_MODEL, metavar=f"[MODEL={DEFAULT_MODEL}]")
def command(model: str) -> None:
    """Fetch MODEL (a catalogue name or org/name), verify it, and say where it is. Quick when it is there already."""
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    click.echo(str(pull(model, default_cache_dir(os.environ), show_progress=True)))
