"""How every `penstock bench` command reports: a table for people, a JSON record for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from penstock.cli.targets import STANDARD_OUTPUT, writable, write_text
from penstock.contract.errors import ConfigError

__all__ = ["json_only", "json_option", "report"]

json_option = click.option(
    "--json",
    "target",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    callback=writable,
    help="Also write the results to this file, as JSON; '-' writes JSON to standard output and all else to standard"
    " error.",
)


def json_only(target: Path | None) -> bool:
    """Whether the record goes to standard output; the table then goes to standard error."""
    return target is not None and str(target) == STANDARD_OUTPUT


def report(table: str, record: dict[str, Any], target: Path | None) -> None:
    """Print the table, and write the record if one is wanted.

    Raises:
        ConfigError: the record cannot be written; it is printed to standard output instead, so that it is not lost.
    """
    click.echo(table, err=json_only(target))
    if target is None:
        return
    text = json.dumps(record, indent=2) + "\n"
    if json_only(target):
        click.echo(text, nl=False)
        return
    try:
        write_text(target, text, "--json")
    except ConfigError:
        click.echo(text, nl=False)
        raise
