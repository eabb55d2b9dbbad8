"""Reads lines of a file that may be compressed, one at a time: the record of a day does not fit in memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.contract.errors import ConfigError, SetupError

__all__ = ["names_file", "read_lines"]

_MAGIC = b"\x1f\x8b"
_EVERY = 1 << 20
"""Bytes of the file between two calls of `progress`."""


def read_lines(path: Path, progress: Callable[[int], object] = lambda count: None) -> Iterator[str]:  # noqa: ARG005
    """The lines of a text file in UTF-8, with their ends; a gzip file is decompressed, whatever its name.

    Args:
        path: the file.
        progress: called now and then with the number of bytes of the file that were read since the last call.

    Raises:
        SetupError: while iterating: the file cannot be read, is not text, or is damaged gzip.
    """
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == _MAGIC
            raw.seek(0)
            told = 0
            with gzip.open(raw) if compressed else raw as data, io.TextIOWrapper(data, encoding="utf-8") as text:
                for line in text:
                    yield line
                    place = raw.tell()
                    if place - told >= _EVERY:
                        progress(place - told)
                        told = place
            progress(path.stat().st_size - told)
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not text in UTF-8: {error}") from error
    except EOFError as error:
        raise SetupError(f"{path} is gzip and ends too early: unpack what there is with gzip -dc") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SetupError(f"{path} is gzip and damaged: {error}") from error
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Add the name of the file to errors about a trace that is read in this block.

    Raises:
        SetupError: in place of a `ConfigError` about the trace.
    """
    try:
        yield
    except ConfigError as error:
        if error.option != "trace":
            raise
        raise SetupError(f"{path}: {str(error).removeprefix('trace: ')}") from error
