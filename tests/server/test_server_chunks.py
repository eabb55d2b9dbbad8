"""Chunks that are framed past h11 are the bytes that h11 would have written."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http.bounded_protocol import _Connection

REQUESTS = {
    "1.1": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "1.0": b"GET / HTTP/1.0\r\nHost: a\r\n\r\n",
    "HEAD": b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
    "close": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
}


def written(connection: h11.Connection, request: bytes, headers: list[tuple[bytes, bytes]], parts: list[bytes]) -> list:
    """All that is written for one answer, event by event."""
    connection.receive_data(request)
    while type(connection.next_event()) is not h11.EndOfMessage:
        pass
    events = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=part) for part in parts)]
    return [connection.send(event) for event in [*events, h11.EndOfMessage()]]


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@given(
    parts=st.lists(st.binary(max_size=40), max_size=5), headers=st.sampled_from([[], [(b"X-A", b"transfer-encoding")]])
)
def test_what_is_written_is_what_h11_writes(request_, parts, headers):
    parts = [] if request_.startswith(b"HEAD") else parts
    plain = h11.Connection(h11.SERVER)
    assert written(_Connection(1000), request_, headers, parts) == written(plain, request_, headers, parts)


def test_a_body_of_known_length_is_still_watched_by_h11():
    with pytest.raises(h11.LocalProtocolError):
        written(_Connection(1000), REQUESTS["1.1"], [(b"Content-Length", b"3")], [b"four"])


def test_an_answer_on_a_connection_that_goes_on_is_framed_by_its_own_headers():
    connection, length = _Connection(1000), [(b"Content-Length", b"3")]
    assert written(connection, REQUESTS["1.1"], [], [b"abc"])[1] == b"3\r\nabc\r\n"
    connection.start_next_cycle()
    assert written(connection, REQUESTS["1.1"], length, [b"abc"])[1].endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize(("request_", "parts"), [("1.1", [b"abc"]), ("1.0", [b"a", b"bc"]), ("HEAD", [])])
def test_the_head_of_an_answer_of_known_length_is_written_with_what_follows(request_, parts):
    headers = [(b"Content-Length", b"3")]
    head, *rest = written(_Connection(1000), REQUESTS[request_], headers, parts)
    by_h11 = written(h11.Connection(h11.SERVER), REQUESTS[request_], headers, parts)
    assert (head, rest) == (b"", [by_h11[0] + by_h11[1], *by_h11[2:]])
