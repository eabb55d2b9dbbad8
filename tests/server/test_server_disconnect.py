"""A client that leaves ends its work, wherever the work is; a client that reads slowly costs nothing."""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest
from scripted_engine import Wait, always, delta, finished, stop

QUEUED = always(Wait())
DECODING = always(delta("x"), delta("y"), Wait())


def post(port: int, path: str, **fields: object) -> socket.socket:
    """A request on a socket of its own, sent whole."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(head.encode() + body)
    return connection


def received_until(connection: socket.socket, mark: bytes) -> bytes:
    """What arrives up to and including `mark`; an answer's head and body may arrive apart."""
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


def leave(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


REQUESTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/generate": {"prompt": "a"},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [QUEUED, DECODING], ids=["queued", "decoding"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_aborts_every_prompt(served, path, stream, script, how):
    served.engine.script = script
    fields = REQUESTS[path]
    prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
    connection = post(served.port, path, stream=stream, **fields)
    served.engine.wait_until(lambda: len(served.engine.live) == prompts)
    if script is DECODING:
        served.engine.wait_until(lambda: served.engine.yielded == 2 * prompts)
    leave(connection, how)
    served.engine.wait_until(lambda: not served.engine.live)
    assert sorted(served.engine.left) == sorted(request.id for request in served.engine.requests)


def test_a_client_that_leaves_does_not_disturb_another(served):
    served.engine.script = lambda request: (
        (delta("x"), Wait())
        if request.prompt.text == "gone"
        else (delta("a"), Wait(0.2), delta("b"), stop(), finished())
    )
    gone = post(served.port, "/generate", prompt="gone", stream=True)
    other = post(served.port, "/generate", prompt="stays")
    served.engine.wait_until(lambda: len(served.engine.requests) == 2)
    leave(gone, "reset")
    with other:
        assert b'"text":"ab"' in received_until(other, b'"usage"')
    assert len(served.engine.left) == 1


def test_an_answer_that_was_read_to_its_end_is_not_aborted(served):
    served.chat()
    served.chat(stream=True)
    assert served.engine.left == []


def test_many_that_leave_at_once_leave_nothing(served):
    served.engine.script = DECODING
    connections = [post(served.port, "/generate", prompt="a", stream=bool(i % 2)) for i in range(40)]
    served.engine.wait_until(lambda: len(served.engine.live) == 40)
    for index, connection in enumerate(connections):
        leave(connection, "reset" if index % 3 else "close")
    served.engine.wait_until(lambda: not served.engine.live)
    assert len(served.engine.left) == 40


def test_a_slow_reader_is_not_read_ahead_for(served):
    piece = "x" * 16384
    total = 4000  # 64 MB: far more than sockets and buffers take
    served.engine.script = lambda request: (*(delta(piece) for _ in range(total)), stop(), finished())
    with post(served.port, "/generate", prompt="a", stream=True) as connection:
        served.engine.wait_until(lambda: served.engine.yielded > 0)
        seen = 0
        while seen != served.engine.yielded:  # until the server waits for the reader
            seen = served.engine.yielded
            time.sleep(0.3)
        assert 0 < seen < total / 2
        connection.recv(1 << 20)
        leave(connection, "reset")
    served.engine.wait_until(lambda: not served.engine.live)
    assert len(served.engine.left) == 1
    assert served.engine.yielded < total / 2


def test_a_reader_that_pauses_loses_nothing(served):
    piece = "y" * 16384
    served.engine.script = lambda request: (*(delta(piece) for _ in range(600)), stop(), finished())
    with served.http.stream("POST", "/generate", json={"prompt": "a", "stream": True}) as response:
        time.sleep(0.1)
        assert sum(len(data) for data in response.iter_bytes()) == 600 * len(piece)
