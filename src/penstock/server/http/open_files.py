"""Cap connections by the process's limit on open files: each connection is one.

A process at that limit cannot accept a connection, not even to refuse it. So the soft limit is raised as far as needed,
and if the system allows less, connections are capped sooner.
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
"""Turns of the event loop between accepting a connection and closing it because there are too many."""

RESERVE = 16 + TURNS_UNTIL_CLOSED * ACCEPTED_AT_ONCE
"""Files for everything else that is opened while the server runs, and for surplus connections being closed."""

OPEN = "/dev/fd"

log = logging.getLogger("penstock.server")


def connections_within_limits(wanted: int) -> int:
    """How many of `wanted` connections can be open at once. Raises the process's soft limit on open files if needed.

    Raises:
        ConfigError: not even one can be open.
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
    """Try to raise the limit on open files to `wanted`; return how many this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < more:
        with contextlib.suppress(ValueError, OSError):  # macOS has its own limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
