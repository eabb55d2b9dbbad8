"""How many connections a process can have, of those that its operator wants: each is an open file.

A process that may open no more files cannot take a connection, not even to refuse it. So as many files as it takes are
asked for, and where the system gives fewer, connections are capped sooner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource

from penstock.contract.errors import ConfigError
from penstock.server.http.bounded_protocol import SURPLUS
from penstock.server.http.listening import ACCEPTED_AT_ONCE

__all__ = ["connections_within_limits"]

TURNS_UNTIL_CLOSED = 4
"""Of the event loop, from when a connection is taken to when it is closed because there are too many."""

RESERVE = 16 + TURNS_UNTIL_CLOSED * ACCEPTED_AT_ONCE
"""Files for what else is opened while the server runs, and for connections that are on their way out."""

OPEN = "/dev/fd"

log = logging.getLogger("penstock.server")


def connections_within_limits(wanted: int) -> int:
    """How many of `wanted` connections there can be at once. Raises the process's soft limit on open files if it must.

    Raises:
        ConfigError: there can be none.
    """
    taken = len(os.listdir(OPEN)) + RESERVE
    files = _files(taken + SURPLUS * wanted)
    most = min(wanted, (files - taken) // SURPLUS)
    if most < 1:
        raise ConfigError(
            "max_connections", f"this process may open {files} files, of which {taken} are needed; raise `ulimit -n`"
        )
    if most < wanted:
        log.warning("connections are capped at %d: this process may open %d files (`ulimit -n`)", most, files)
    return most


def _files(wanted: int) -> int:
    """How many files this process may open, after asking for `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < more:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
