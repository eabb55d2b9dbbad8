"""Temporary names for files being written, so that the final name never refers to half a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.contract.errors import ConfigError

__all__ = ["check_room", "passing_name", "whole_directory"]

_SPARE_BYTES = 64 << 20


def passing_name(target: Path) -> Path:
    """The temporary name under which this process writes `target`: in the same folder, so that renaming is free."""
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


def check_room(folder: Path, needed: int) -> None:
    """Raise ConfigError unless `folder`'s disk has room for `needed` bytes and 64 MiB to spare."""
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise ConfigError("TARGET", f"{folder} has {free / 1e9:.1f} GB free, and the file takes {needed / 1e9:.1f} GB")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield a directory to fill; it is renamed to `target` at the end, or removed if anything is raised.

    Args:
        target: does not exist, or is an empty directory.

    Raises:
        ConfigError: the directory cannot be written.
    """
    partial = passing_name(target)
    try:
        partial.mkdir()
        yield partial
        partial.replace(target)
    except OSError as error:
        raise ConfigError("TARGET", f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
