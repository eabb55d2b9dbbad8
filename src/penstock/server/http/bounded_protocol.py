"""uvicorn's protocol for one HTTP connection, with bounds on what a connection may cost.

A client must send its headers in time and read its response in time; otherwise the connection is closed, which cancels
its work as any disconnect does. Connections are capped. Bytes that are not valid HTTP are answered with an OpenAI error
object, and so are ambiguous requests, which a proxy that guards this server might parse differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.contract.errors import Overloaded, PenstockError, RefusalCause
from penstock.contract.limits import ServerLimits
from penstock.server.http.envelope import new_request_id
from penstock.server.http.failures import HttpRefusal, error_response
from penstock.server.http.known_refusals import NOT_BEGUN, Begun, KnownRefusals, refused_unread

__all__ = ["SURPLUS", "BoundedProtocol", "bounded_protocol"]

SURPLUS = 2
"""Connections beyond this multiple of the cap are closed without a response."""


OnRefusal = Callable[[RefusalCause], None]


def _count_nowhere(_: RefusalCause) -> None:
    """Ignore refusals on a port that clients do not use."""


def bounded_protocol(
    limits: ServerLimits,
    max_connections: int,
    on_refusal: OnRefusal = _count_nowhere,
    known_refusals: KnownRefusals | None = None,
) -> Any:
    """Return the value for `uvicorn.Config(http=...)`.

    Args:
        limits: limits on headers and on slow clients.
        max_connections: further connections are refused.
        on_refusal: called for each refusal that the application does not see.
        known_refusals: refusals that are repeated without the application.
    """
    return partial(BoundedProtocol, limits, max_connections, on_refusal, known_refusals)


class _Connection(h11.Connection):
    """h11's connection state, stricter on input and cheaper on output.

    Nearly every output event is a chunk of a body. It changes no state, yet h11 spends a tenth of the event loop's time
    per streamed token on it, so chunks are written here. A response of known length goes out in one write: a second
    write would add a sixth to the cost of a refusal.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._in_chunks = False
        self._head = b""  # head of a response of known length, held back until its body begins
        self.whole_answer = b""  # the last response of known length

    def send(self, event: h11.Event) -> Any:
        """Return the bytes to write, or None to close the connection, as in h11."""
        if self._in_chunks and type(event) is h11.Data:
            # An empty chunk would end the body (RFC 9112, section 7.1).
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        written = super().send(event)
        if isinstance(event, h11.Response) and written:
            head = written.lower()
            self._in_chunks = b"\r\ntransfer-encoding: chunked\r\n" in head
            if b"\r\ncontent-length: " in head:
                self._head, written = written, b""
            return written
        self._in_chunks = False
        if self._head and written is not None:
            self._head, written = b"", self._head + written
            self.whole_answer = written
        return written

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event as h11 does, but refuse ambiguous requests, as RFC 9112 permits.

        Raises:
            h11.RemoteProtocolError: the request has both Content-Length and Transfer-Encoding (section 6.1), a line
                ends without a carriage return (section 2.2), or a header is folded (section 5.2).
        """
        if self.their_state is h11.IDLE:
            _require_strict_lines(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= set(dict(event.headers)):
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


def _require_strict_lines(received: bytes) -> None:
    """Apply the line rules of `_Connection.next_event` to a request head, or to the part received so far."""
    head = received.lstrip(b"\r\n").partition(b"\r\n\r\n")[0]
    bare = head.count(b"\n") != head.count(b"\r\n")
    if bare or b"\n " in head or b"\n\t" in head:
        raise h11.RemoteProtocolError("a line feed alone, or a folded header")


class BoundedProtocol(H11Protocol):
    """One bounded connection; see the module. Confined to the event loop."""

    conn: _Connection

    def __init__(
        self,
        limits: ServerLimits,
        max_connections: int,
        on_refusal: OnRefusal,
        known_refusals: KnownRefusals | None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._on_refusal = on_refusal
        self._known_refusals = known_refusals
        self._begun = NOT_BEGUN  # the start of the current request, if the connection was idle before it
        self.conn = _Connection(limits.max_header_bytes)
        self._limits = limits
        self._max_connections = max_connections
        self._surplus = False
        self._waiting_for_headers: asyncio.TimerHandle | None = None
        self._waiting_for_reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timer, or close a connection far beyond the cap."""
        super().connection_made(transport)
        self._surplus = len(self.connections) > self._max_connections
        if len(self.connections) > SURPLUS * self._max_connections:
            self._on_refusal(RefusalCause.CONNECTIONS)
            transport.abort()
            return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Handle more bytes of a request, unless it can be refused without the application."""
        if self._surplus:
            message = f"{self._max_connections} connections are open already."
            self._refuse(Overloaded(message, cause=RefusalCause.CONNECTIONS))
            return
        self._begun = NOT_BEGUN if self._known_refusals is None or not self._rests() else Begun.of(data)
        if self._refuse_again():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._headers_came()
            self._reader_came()

    def pause_writing(self) -> None:
        """The write buffer is full: give the client a time limit to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The client reads again: drop its time limit."""
        super().resume_writing()
        self._reader_came()

    def on_response_complete(self) -> None:
        """The transport has the whole response; the client may not have read it yet. Remember it if it is a refusal."""
        if self.transport.get_write_buffer_size():
            self._await_reader()
        if self._known_refusals is not None and self._begun.digest:
            refused, common = refused_unread(self.scope), self.server_state.default_headers
            if refused is not None:
                self._known_refusals.learn(self._begun, self.conn.whole_answer, refused, common)
        self._begun, self.conn.whole_answer = NOT_BEGUN, b""
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of a closed connection."""
        self._headers_came()
        self._reader_came()
        super().connection_lost(exc)

    def finish(self) -> None:
        """Take no more requests, except one that may be in flight: a connection's first, or one partly received."""
        if self.cycle is None or not self.cycle.response_complete:
            self.end_after_answer()
        elif not self.conn.trailing_data[0]:
            self.shutdown()

    def end_after_answer(self) -> None:
        """Close the connection after the current response, if there is one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """Close the connection now, and drop unwritten data."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's text says no more than this)
        """Refuse bytes that are not valid HTTP."""
        most = self._limits.max_header_bytes
        message = f"This is not a valid HTTP request, or its headers have more than {most} bytes."
        self._refuse(HttpRefusal(400, message, code="invalid_http", cause=RefusalCause.HEADERS))

    def _rests(self) -> bool:
        """Whether the connection is idle, so that the next bytes begin a request."""
        conn = self.conn
        idle = conn.our_state is h11.IDLE and conn.their_state is h11.IDLE and not conn.trailing_data[0]
        return idle and not self.flow.write_paused and not self.transport.is_closing()

    def _refuse_again(self) -> bool:
        """Refuse the request that has just begun if its refusal is known; return whether it was refused."""
        if self._known_refusals is None or not self._begun.digest:
            return False
        answer = self._known_refusals.answer(self._begun, self.server_state.default_headers)
        if answer is None:
            return False
        self._headers_came()
        self.transport.write(answer)
        self._begun = NOT_BEGUN  # nothing to learn from a repeated refusal
        self.on_response_complete()
        return True

    def _await_headers(self) -> None:
        if self._waiting_for_headers is None:
            self._waiting_for_headers = self.loop.call_later(self._limits.header_seconds, self._headers_late)

    def _headers_came(self) -> None:
        if self._waiting_for_headers is not None:
            self._waiting_for_headers.cancel()
            self._waiting_for_headers = None

    def _headers_late(self) -> None:
        seconds = self._limits.header_seconds
        message = f"The request's headers did not arrive within {seconds:g} seconds."
        self._refuse(HttpRefusal(408, message, code="request_timeout", cause=RefusalCause.HEADERS))

    def _await_reader(self) -> None:
        if self._waiting_for_reader is None:
            self._waiting_for_reader = self.loop.call_later(self._limits.write_seconds, self._reader_late)

    def _reader_came(self) -> None:
        if self._waiting_for_reader is not None:
            self._waiting_for_reader.cancel()
            self._waiting_for_reader = None

    def _reader_late(self) -> None:
        self._waiting_for_reader = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, error: PenstockError) -> None:
        """Send an error without asking the application, and close the connection."""
        self._headers_came()
        if self.transport.is_closing():
            return
        if error.cause is not None:
            self._on_refusal(error.cause)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # another response is half written: no error can be sent
            return
        response = error_response(error)
        request_id = new_request_id().encode()
        headers = [*response.raw_headers, (b"x-request-id", request_id), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=response.status_code, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
