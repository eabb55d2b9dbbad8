"""Writing to a pipe whose reader has gone: a server serves on, and its exit code does not tell of it.

Python ignores SIGPIPE, so each write raises; and what was not written is tried once more at the end of the process,
which then ends with code 120.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO

__all__ = ["silence", "unread_is_fine"]


def silence(stream: TextIO) -> None:
    """From now on, what is written to `stream` goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def unread_is_fine(stream: TextIO) -> Iterator[None]:
    """Inside, something is written to `stream`; if nobody reads it any more, it is silent from now on."""
    try:
        yield
    except BrokenPipeError:
        silence(stream)
