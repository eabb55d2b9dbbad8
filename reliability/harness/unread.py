"""Requests whose answers are kept as bytes, and read once the load is over.

For loads of hundreds a second beside the server that they try: whatever their sender computes meanwhile, the server
lacks. Connections are used again, as every client does that has a pool, so that neither side spends its time on opening
them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import h11

from harness.client import Answer, AnswerReader, head_of, now
from penstock.bench.event_stream import Target

__all__ = ["Sender", "UnreadAnswer", "request_bytes"]

SECONDS = 300.0
"""After which an answer that has not ended counts as hung."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


def request_bytes(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST of a JSON value."""
    content = json.dumps(body).encode()
    return head_of(path, len(content), headers) + content


class UnreadAnswer:
    """The bytes of one answer, with the moment at which each piece came. Confined to its event loop.

    Attributes:
        sent: when the request was made.
        ended: when the answer had ended, or broke.
        broken: why it did not come whole.
    """

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.sent = now()
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.broken = ""
        self._pieces: list[tuple[float, bytes]] = []
        self._left = -1  # bytes that the rest of an answer of known length has; below 0, it has chunks

    @property
    def begun(self) -> bool:
        """Whether anything of it has come."""
        return bool(self._pieces)

    def take(self, data: bytes) -> bool:
        """Keep a piece; whether it was the last. A stream's end is told by its last bytes, so it must come in order."""
        if not self._pieces:
            head, _, body = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head + b"\r\n")
            self._left = int(length[1]) - len(body) if length else -1
        elif self._left > 0:
            self._left -= len(data)
        self._pieces.append((now(), data))
        return self._left == 0 or (self._left < 0 and data.endswith(_LAST_CHUNK))

    def end(self, broken: str = "") -> None:
        """Nothing more comes; called again, it changes nothing."""
        if not self.ended.done():
            self.broken = broken
            self.ended.set_result(now())

    def read(self) -> Answer:
        """What came of it; to be called when it has ended."""
        answer = Answer(sent=self.sent, ended=self.ended.result(), broken=self.broken)
        reader = AnswerReader(answer, "POST")
        try:
            whole = any(reader.take(data, moment) for moment, data in self._pieces)
            if not whole and not reader.take(b"", answer.ended):
                raise h11.RemoteProtocolError("the answer ended in its middle")
        except h11.RemoteProtocolError as error:
            answer.broken = answer.broken or f"{type(error).__name__}: {error}"
        return answer


class Sender:
    """Sends requests to one server over as many connections as have answers under way. Confined to an event loop."""

    def __init__(self, url: str) -> None:
        target = Target.parse(url)
        self._host, self._port = target.host, target.port
        self._idle: list[_Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, request: bytes) -> UnreadAnswer:
        """Begin a request; raises nothing of it."""
        answer = UnreadAnswer(request)
        self._begin(answer)
        return answer

    async def ended(self, answers: list[UnreadAnswer]) -> list[UnreadAnswer]:
        """The same answers once all of them have ended, of which one that hangs is ended here."""
        if answers:
            await asyncio.wait([each.ended for each in answers], timeout=SECONDS)
        for each in answers:
            each.end(f"no end within {SECONDS:g} s")
        return answers

    def close(self) -> None:
        """Close the connections that nothing is under way on."""
        for each in self._idle:
            each.transport.close()

    def _begin(self, answer: UnreadAnswer) -> None:
        while self._idle:
            connection = self._idle.pop()  # the one that was used last: the server closes those that rest for seconds
            if not connection.transport.is_closing():
                connection.begin(answer)
                return
        task = asyncio.ensure_future(self._connect(answer))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, answer: UnreadAnswer) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError as error:
            answer.end(f"{type(error).__name__}: {error}")
        else:
            connection.begin(answer)

    def _rests(self, connection: _Connection) -> None:
        self._idle.append(connection)


class _Connection(asyncio.Protocol):
    """One connection of a `Sender`."""

    transport: asyncio.Transport

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._answer: UnreadAnswer | None = None
        self._used = False

    def begin(self, answer: UnreadAnswer) -> None:
        """Send an answer's request."""
        self._answer = answer
        self.transport.write(answer.request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep a piece."""
        answer = self._answer
        if answer is not None and answer.take(data):
            self._answer, self._used = None, True
            answer.end()
            self._sender._rests(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is whole, or will never be; one whose request met the end of a used connection is sent again."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._used and not answer.begun:
            self._sender._begin(answer)
        else:
            answer.end(f"{type(exc).__name__}: {exc}" if exc else "")
