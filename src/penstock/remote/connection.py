"""One end of the connection between an engine and its runner's process: sends and receives values.

A message is its length in four bytes, little-endian, and then a value as MessagePack. Received values are checked
against their type. A malformed message counts as the end of the connection, because it is unknown where the next one
would begin. A socket can be passed along with a message.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["Closed", "Connection"]

_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 30
_READ_BYTES = 1 << 16
_MOST_PASSED = 1

_Received = TypeVar("_Received")


class Closed(Exception):
    """The other end is gone, or sent a malformed message."""


class Connection(Generic[_Received]):
    """Sends values, and receives those of one type. Used by one thread at a time.

    Args:
        stream: a connected stream socket; owned by this object from now on.
        received: the type of received values, a union of tagged structs.
    """

    def __init__(self, stream: socket.socket, received: Any) -> None:
        self._stream = stream
        self._decoder: msgspec.msgpack.Decoder[_Received] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: list[socket.socket] = []  # received, but not taken yet
        self._held = bytearray()  # bytes of an incomplete message, so that a timeout loses nothing

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._stream.fileno()

    def send(self, value: msgspec.Struct, passed: socket.socket | None = None) -> None:
        """Send one value.

        Args:
            value: a struct of the type that the other end receives.
            passed: a socket to pass along; the other end gets its own descriptor for it.

        Raises:
            Closed: the other end is gone.
        """
        body = self._encoder.encode(value)
        try:
            self._stream.settimeout(None)
            message = len(body).to_bytes(_LENGTH_BYTES, "little") + body
            if passed is not None:
                message = message[socket.send_fds(self._stream, [message], [passed.fileno()]) :]
            self._stream.sendall(message)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, seconds: float | None = None) -> _Received:
        """Receive the next value.

        Args:
            seconds: how long to wait for more bytes; None to wait without limit.

        Raises:
            TimeoutError: nothing came for that long; a message that comes later is not lost.
            Closed: the other end is gone, or sent a malformed message.
        """
        while True:
            body = self._take_body()
            if body is not None:
                try:
                    return self._decoder.decode(body)
                except (msgspec.MsgspecError, ValueError) as error:
                    raise Closed(f"not a message: {error}") from error
            self._read(seconds)

    def take_socket(self) -> socket.socket:
        """Take the oldest socket that came with a message.

        Raises:
            Closed: there is none.
        """
        if not self._sockets:
            raise Closed("no socket came with the message")
        return self._sockets.pop(0)

    def close(self) -> None:
        """Close the socket, and sockets that were received but not taken."""
        for each in (self._stream, *self._sockets):
            each.close()

    def _take_body(self) -> bytes | None:
        held = self._held
        if len(held) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(held[:_LENGTH_BYTES], "little")
        if length > _MOST_BYTES:
            raise Closed(f"not a message: it would have {length} bytes")
        end = _LENGTH_BYTES + length
        if len(held) < end:
            return None
        body = bytes(held[_LENGTH_BYTES:end])
        del held[:end]
        return body

    def _read(self, seconds: float | None) -> None:
        try:
            self._stream.settimeout(seconds)
            more, passed, _, _ = socket.recv_fds(self._stream, _READ_BYTES, _MOST_PASSED)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error
        if not more:
            raise Closed("the other end is gone")
        self._held += more
        for descriptor in passed:
            os.set_inheritable(descriptor, False)
            self._sockets.append(socket.socket(fileno=descriptor))
