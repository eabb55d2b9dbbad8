"""Sends requests whose answers are kept as bytes, and parsed only once the load is over.

For loads of hundreds of requests a second on the machine of the server under test: processor time that the sender uses
is lost to the server. So the sender is one thread that waits for sockets, and reuses connections as every client with a
pool does.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import h11

from harness.client import Answer, AnswerReader, head_of, now
from penstock.bench.event_stream import Target

__all__ = ["Then", "UnreadAnswer", "exchange", "request_bytes"]

SECONDS = 300.0
"""Seconds without a byte on any connection, after which whatever has not ended counts as hung."""

_READ_BYTES = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


def request_bytes(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a POST of a JSON value."""
    content = json.dumps(body).encode()
    return head_of(path, len(content), headers) + content


class UnreadAnswer:
    """Holds the bytes of one answer, with the moment at which each piece came.

    Attributes:
        request: the request's bytes.
        sent: when the request was begun.
        ended: when the answer had ended, or broke; 0.0 until then.
        broken: why the answer is incomplete.
    """

    __slots__ = ("_left", "_pieces", "broken", "ended", "request", "sent")

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.sent = now()
        self.ended = 0.0
        self.broken = ""
        self._pieces: list[tuple[float, bytes]] = []
        self._left = -1  # bytes still to come of an answer of known length; below 0, the answer is chunked

    @property
    def begun(self) -> bool:
        """Whether any byte of the answer has come."""
        return bool(self._pieces)

    def take(self, data: bytes) -> bool:
        """Keep a piece; returns whether it was the last. The last bytes of a piece show the end of a stream."""
        if not self._pieces:
            head, _, body = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head + b"\r\n")
            self._left = int(length[1]) - len(body) if length else -1
        elif self._left > 0:
            self._left -= len(data)
        self._pieces.append((now(), data))
        return self._left == 0 or (self._left < 0 and data.endswith(_LAST_CHUNK))

    def end(self, broken: str = "") -> None:
        """Note that nothing more comes."""
        self.ended, self.broken = now(), broken

    def read(self) -> Answer:
        """Parse the answer; call this when it has ended."""
        answer = Answer(sent=self.sent, ended=self.ended, broken=self.broken)
        reader = AnswerReader(answer, "POST")
        try:
            whole = any(reader.take(data, moment) for moment, data in self._pieces)
            if not whole and not reader.take(b"", answer.ended):
                raise h11.RemoteProtocolError("the answer ended in its middle")
        except h11.RemoteProtocolError as error:
            answer.broken = answer.broken or f"{type(error).__name__}: {error}"
        return answer


Then = Callable[[], bytes | None]
"""Called when an answer has ended; returns what to send next, at once, or None."""


def exchange(url: str, planned: Iterable[tuple[float, bytes]], then: Then = lambda: None) -> list[UnreadAnswer]:
    """Send each request at its time, whether others are answered or not, and wait for all answers.

    Args:
        url: the server's URL.
        planned: seconds from now and the request's bytes, in ascending order.
        then: see `Then`.

    Returns:
        The answers, in the order in which their requests were sent. A failed answer raises nothing.
    """
    sender = _Sender(Target.parse(url), then)
    try:
        for after, request in [*planned]:
            while (early := sender.began + after - now()) > 0:
                sender.read(early)
            sender.send(UnreadAnswer(request))
        while sender.under_way and sender.read(SECONDS):
            pass
    finally:
        sender.close()
    return sender.answers


class _Connection:
    """One connection, and the answer that is under way on it."""

    __slots__ = ("answer", "sock", "used")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.answer: UnreadAnswer | None = None
        self.used = False


class _Sender:
    """The connections of one exchange."""

    def __init__(self, target: Target, then: Then) -> None:
        self.answers: list[UnreadAnswer] = []
        self.under_way = 0
        self._target = target
        self._then = then
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self.began = now()

    def send(self, answer: UnreadAnswer) -> None:
        """Begin to send a request."""
        self.answers.append(answer)
        self.under_way += 1
        self._begin(answer)

    def read(self, seconds: float) -> bool:
        """Take what has come, or comes within `seconds`; returns whether anything did."""
        found = self._selector.select(seconds)
        for key, _ in found:
            self._read(key.data)
        return bool(found)

    def close(self) -> None:
        """Close all connections; answers under way on them are broken."""
        for key in [*self._selector.get_map().values()]:
            connection: _Connection = key.data
            if connection.answer is not None:
                connection.answer.end(f"no end within {SECONDS:g} s")
            connection.sock.close()
        self._selector.close()

    def _begin(self, answer: UnreadAnswer) -> None:
        try:
            # Take the connection that was used last: the server closes connections that are idle for seconds.
            connection = self._idle.pop() if self._idle else self._open()
        except OSError as error:
            self._end(answer, f"{type(error).__name__}: {error}")
            return
        connection.answer = answer
        with suppress(OSError):  # reading will show if the server has closed the connection
            connection.sock.sendall(answer.request)

    def _open(self) -> _Connection:
        sock = socket.create_connection((self._target.host, self._target.port), SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _read(self, connection: _Connection) -> None:
        broken = ""
        try:
            data = connection.sock.recv(_READ_BYTES)
        except OSError as error:
            data, broken = b"", f"{type(error).__name__}: {error}"
        answer = connection.answer
        if data and answer is not None:
            if answer.take(data):
                connection.answer, connection.used = None, True
                self._idle.append(connection)
                self._end(answer)
            return
        self._lost(connection, answer, broken)

    def _lost(self, connection: _Connection, answer: UnreadAnswer | None, broken: str) -> None:
        """Handle a connection's end; a request that met the end of a used connection is sent again, as clients do."""
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection in self._idle:
            self._idle.remove(connection)
        if answer is None:
            return
        connection.answer = None
        if connection.used and not answer.begun:
            self._begin(answer)
        else:
            self._end(answer, broken)

    def _end(self, answer: UnreadAnswer, broken: str = "") -> None:
        answer.end(broken)
        self.under_way -= 1
        if (request := self._then()) is not None:
            self.send(UnreadAnswer(request))
