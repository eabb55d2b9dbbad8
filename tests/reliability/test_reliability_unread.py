"""The load sender: what it keeps is read like any other answer, and nothing is lost on reused connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scripted_engine import ScriptedEngine
from server_harness import running

from harness.client import said
from harness.requests import COMPLETIONS
from harness.unread import exchange, request_bytes
from penstock.contract.errors import Overloaded, RefusalCause

FULL = Overloaded("64 sequences are waiting already.", retry_after=7, cause=RefusalCause.QUEUE_SEQUENCES)
STREAMED = request_bytes(COMPLETIONS, {"prompt": "a", "stream": True, "max_tokens": 8})
WHOLE = request_bytes(COMPLETIONS, {"prompt": "a", "max_tokens": 8})
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"


def test_streams_whole_answers_and_refusals_are_kept_in_the_order_of_their_requests():
    engine = ScriptedEngine()
    with running(engine) as url:
        answers = [each.read() for each in exchange(url, [(0.0, STREAMED), (0.01, WHOLE), (0.02, STREAMED)])]
        engine.full[""] = FULL
        refused = [each.read() for each in exchange(url, [(0.0, WHOLE)] * 3)]
    assert all(each.finished for each in answers)
    texts = [said(each)["choices"]["0"]["text"] for each in answers]
    assert texts[0] == texts[1] == texts[2] != ""
    assert answers[0].events[-1].data == "[DONE]"
    assert answers[0].sent < answers[0].first_token + answers[0].sent <= answers[0].ended
    assert [each.status for each in refused] == [429] * 3
    assert [each.headers["retry-after"] for each in refused] == ["7"] * 3


def test_one_follows_another_as_long_as_somebody_asks():
    left = [WHOLE] * 5
    with running(ScriptedEngine()) as url:
        answers = exchange(url, [(0.0, WHOLE)] * 2, lambda: left.pop() if left else None)
    assert len(answers) == 7
    assert all(each.read().finished for each in answers)


@contextmanager
def serving(*connections: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that hands each connection to the next of `connections`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for each in connections:
                with listening.accept()[0] as taken:
                    each(taken)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def answering(times: int) -> Callable[[socket.socket], None]:
    def answer(taken: socket.socket) -> None:
        for _ in range(times):
            got = b""
            while not got.endswith(WHOLE[-10:]):
                got += taken.recv(65536)
            taken.sendall(REFUSED)

    return answer


def test_a_request_that_meets_the_end_of_a_used_connection_is_sent_again():
    with serving(answering(1), answering(2)) as url:
        answers = [each.read() for each in exchange(url, [(0.0, WHOLE), (0.3, WHOLE), (0.4, WHOLE)])]
    assert [(each.status, each.broken) for each in answers] == [(429, "")] * 3


def test_an_answer_that_breaks_off_is_said_to():
    def breaks_off(taken: socket.socket) -> None:
        taken.recv(65536)
        taken.sendall(REFUSED[:-1])

    with serving(breaks_off) as url:
        [answer] = exchange(url, [(0.0, WHOLE)])
    assert "RemoteProtocolError" in answer.read().broken


def test_without_a_server_every_answer_is_broken():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    answers = [each.read() for each in exchange(url, [(0.0, WHOLE), (0.0, WHOLE)])]
    assert all("ConnectionRefusedError" in each.broken for each in answers)
