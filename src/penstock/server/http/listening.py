"""Listening sockets, and the connections that wait on them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from penstock.contract.errors import ConfigError

__all__ = ["ACCEPTED_AT_ONCE", "BACKLOG", "connections_that_wait", "listen"]

BACKLOG = 2048
"""Connections that the system queues until the process accepts them."""

ACCEPTED_AT_ONCE = 4
"""Connections that asyncio accepts at a time before any can be refused: open files can exceed the cap by this many."""

NOBODY_WAITS = (errno.EAGAIN, errno.EWOULDBLOCK)


def listen(host: str, port: int, option: str = "") -> socket.socket:
    """Open a TCP socket that listens on an address; the caller closes it.

    Args:
        host: a name or an address.
        port: 0 takes a free one.
        option: the prefix of the two option names, for errors.

    Raises:
        ConfigError: cannot listen on the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol: asyncio disables Nagle's algorithm only on sockets that report TCP. With it on, every response
    # of two writes waits for the client's delayed ACK, 40 ms on Linux.
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
    """Accept every connection that the system has queued. Closing `listening` would reset them."""
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
