"""Files for a command's results: checked when the options are read, not when the work is done."""

from __future__ import annotations

import os
from pathlib import Path

import click

from penstock.contract.errors import ConfigError

__all__ = ["writable", "write_text"]

STANDARD_OUTPUT = "-"


def writable(context: click.Context, parameter: click.Parameter, target: Path | None) -> Path | None:
    """A callback for options that name a file to be written.

    A default is not checked: it may never be needed.

    Raises:
        ConfigError: the file's folder is missing, or the file cannot be written; names the option.
    """
    given = context.get_parameter_source(parameter.name or "") is not click.core.ParameterSource.DEFAULT
    if target is None or not given or str(target) == STANDARD_OUTPUT:
        return target
    folder = target.parent
    if not folder.is_dir():
        raise ConfigError(parameter.opts[0], f"{target} cannot be written: there is no folder {folder}")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise ConfigError(parameter.opts[0], f"{target} cannot be written: permission denied")
    return target


def write_text(target: Path, text: str, option: str) -> None:
    """Write a whole file.

    Raises:
        ConfigError: the file cannot be written; names the option.
    """
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(option, f"{target} cannot be written: {error.strerror}") from error
