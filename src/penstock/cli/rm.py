"""`penstock rm`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from penstock.cli.sections import complete_model
from penstock.contract.errors import ConfigError, ModelUnavailable

__all__ = ["command"]


@click.command("rm")
@click.argument("model", shell_complete=complete_model)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def command(model: str, yes: bool) -> None:
    """Remove MODEL, a name that `penstock models` lists, from the cache; ask first, and print how much is freed.

    A model that a running server serves is not removed.
    """
    from penstock.cli.running_servers import running_servers
    from penstock.weights.locate import default_cache_dir, installed_models

    cache_dir = default_cache_dir(os.environ)
    installed = {each.name: each for each in installed_models(cache_dir)}
    if model not in installed:
        raise ModelUnavailable(f"{model}: is not in the cache; there: {', '.join(installed) or 'nothing'}")
    found = installed[model]
    folder = found.path if found.path.is_dir() else found.path.parent
    for server in running_servers(cache_dir):
        if any(Path(path).is_relative_to(folder.resolve()) for path in server.paths):
            who = f"process {server.pid} serves it at {server.url}"
            raise ModelUnavailable(f"{model}: is in use: {who}; end that first (kill {server.pid})")
    size = f"{found.bytes:,} bytes ({found.bytes / 1e6:.1f} MB)"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("--yes", "is needed where nobody can be asked")
        if not click.confirm(f"Remove {model}, {size} in {folder}?"):
            return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelUnavailable(f"{model}: {folder} cannot be removed: {error.strerror}") from error
    click.echo(f"{size} freed")
