"""`penstock models`."""

from __future__ import annotations

import os

import click

__all__ = ["command"]


@click.command("models")
def command() -> None:
    """List the models that can be named, with size and path of each one that is on disk."""
    from penstock.weights.catalogue import CATALOGUE
    from penstock.weights.locate import default_cache_dir, installed_models

    installed = {model.name: model for model in installed_models(default_cache_dir(os.environ))}
    names = [*CATALOGUE, *(name for name in installed if name not in CATALOGUE)]
    width = max(len(name) for name in names)
    for name in names:
        if name in installed:
            state = f"{installed[name].bytes / 1e6:8.1f} MB  {installed[name].path}"
        else:
            state = f"{'':11}  not on disk; run: penstock pull {name}"
        click.echo(f"{name:{width}}  {state}")
    click.echo("Beside these: a directory in Hugging Face layout, a .gguf file, or org/name on the Hugging Face hub.")
