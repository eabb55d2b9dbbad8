"""Tolerate output to a pipe whose reader has gone: the server keeps serving, and its exit code is unaffected.

Python ignores SIGPIPE, so each write to such a pipe raises; and Python flushes unwritten output again at exit, which
then ends the process with code 120.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO

__all__ = ["silence", "unread_is_fine"]


def silence(stream: TextIO) -> None:
    """Discard everything written to `stream` from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def unread_is_fine(stream: TextIO) -> Iterator[None]:
    """Allow a broken pipe while writing to `stream` inside; once it breaks, `stream` is silenced."""
    try:
        yield
    except BrokenPipeError:
        silence(stream)
