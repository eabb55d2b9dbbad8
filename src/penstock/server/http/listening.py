"""Sockets that listen, and how many connections the system lets a process have."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from penstock.contract.errors import ConfigError

__all__ = ["ACCEPTED_AT_ONCE", "BACKLOG", "connections_that_wait", "listen"]

BACKLOG = 2048
"""Connections that the system accepts for a process that has not taken them yet."""

ACCEPTED_AT_ONCE = 4
"""Connections that asyncio takes before it looks at any of them: no more open files than that are out of control."""

NOBODY_WAITS = (errno.EAGAIN, errno.EWOULDBLOCK)


def listen(host: str, port: int, option: str = "") -> socket.socket:
    """A TCP socket that listens on an address; the caller closes it.

    Args:
        host: a name or an address.
        port: 0 takes a free one.
        option: what the names of the two options begin with.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and with
    # it on, every answer of two writes waits for the client's delayed acknowledgement, 40 ms on Linux.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except socket.gaierror as error:
        listening.close()
        raise ConfigError(f"{option}host", f"{host!r} is no address of this machine: {error.strerror}") from None
    except OSError as error:
        listening.close()
        raise ConfigError(f"{option}port", f"cannot listen on {host}, port {port}: {error.strerror}") from None
    return listening


def connections_that_wait(listening: socket.socket) -> Iterator[socket.socket]:
    """Every connection that the system has accepted and nobody has taken. Closing `listening` would reset them."""
    listening.setblocking(False)
    while True:
        try:
            connection, _ = listening.accept()
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if error.errno not in NOBODY_WAITS:
                raise
            return
        connection.setblocking(False)
        yield connection
