"""`penstock completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["command"]

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_PENSTOCK_COMPLETE"
"""The variable that the script sets to ask `penstock` for completions; click derives it from the program's name."""


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, /, shell: str) -> None:
    """Print a script that lets SHELL complete commands, options and models.

    bash: penstock completion bash > ~/.local/share/bash-completion/completions/penstock. zsh: save it as _penstock in a
    folder on the fpath. fish: penstock completion fish > ~/.config/fish/completions/penstock.fish.
    """
    shell_class = get_completion_class(shell)
    assert shell_class is not None, shell
    click.echo(shell_class(context.find_root().command, {}, "penstock", VARIABLE).source())
