"""`penstock chat --base-url` under a pseudo-terminal, against servers that run, are missing, or die in an answer."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from served import ALONE, serve, start
from terminal import Terminal

SMALL = ("--kv-cache-memory", "400MB", "--threads", "1", "--dtype", "float32")
KEY = "a-key-of-many-letters"
ENDLESS = ("--max-tokens", "300000", "--ignore-eos", "--temperature", "0")


@pytest.fixture(scope="module")
def server(endless, tmp_path_factory):
    """A server with a key, whose model never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    with serve(folder / "trace.jsonl", endless, "--api-key-file", str(keys), *SMALL) as served:
        yield served


def ask(terminal: Terminal, question: str) -> None:
    terminal.expect("> ")
    terminal.type(f"{question}\r")


def leave(terminal: Terminal) -> None:
    ask(terminal, "/exit")
    assert terminal.ends() == 0, terminal.screen
    assert "Traceback" not in terminal.screen
    assert terminal.left_running() == []


def refused(*arguments: str, **environment: str) -> str:
    """What a chat says when it ends at once."""
    with Terminal("chat", *arguments, **environment) as terminal:
        assert terminal.ends() == 2, terminal.screen
        return " ".join(terminal.screen.split())


def answered(screen: str) -> str:
    """The answer, which stands above the line with its figures; earlier drawings of it do not count.

    That line begins with the rate, unless all tokens came at once.
    """
    pieces = [piece.strip() for piece in re.split(r"[\r\n]+", screen) if piece.strip()]
    return pieces[-2] if pieces[-1].endswith("tokens/s ·") else pieces[-1]


def test_a_conversation_is_interrupted_and_goes_on(server):
    with Terminal("chat", "--base-url", server.url, "--api-key", KEY, *ENDLESS) as terminal:
        ask(terminal, "abc")
        terminal.expect("<")  # made-up words look like this
        terminal.interrupt()
        terminal.expect("[stopped]")
        terminal.expect("first after")
        assert re.search(r" s · \d+(?: of \d+)? $", terminal.expect("tokens of context"))
        ask(terminal, "/stats")
        terminal.expect("answers   1 of ")
        stopped = int(terminal.expect(" tokens"))
        assert stopped > 0
        ask(terminal, "/set max_tokens 6")
        ask(terminal, "def")
        answer = answered(terminal.expect("first after"))
        assert answer != "> def"
        ask(terminal, "/stats")
        terminal.expect(f"answers   2 of {stopped + 6} tokens")
        terminal.expect("context   ")
        used = int(terminal.expect(" of "))
        ask(terminal, "/retry")
        assert answered(terminal.expect("first after")) == answer
        ask(terminal, "/stats")
        terminal.expect(f"answers   3 of {stopped + 12} tokens")
        terminal.expect("context   ")
        assert int(terminal.expect(" of ")) == used
        leave(terminal)
    health = httpx.get(f"{server.url}/health", headers={"x-api-key": KEY}).json()
    assert (health["running"], health["waiting"]) == (0, 0)


def test_a_server_with_a_key_is_told_it_or_says_how(server):
    said = refused("--base-url", server.url)
    assert "--api-key: " in said
    assert "PENSTOCK_API_KEY" in said
    assert "--api-key: " in refused("--base-url", server.url, "--api-key", "another-key-of-many-letters")
    with Terminal("chat", "--base-url", server.url, "--max-tokens", "3", PENSTOCK_API_KEY=KEY) as terminal:
        ask(terminal, "abc")
        terminal.expect("tokens of context")  # whatever it draws, perhaps an end at once
        leave(terminal)


def test_a_server_that_is_not_there_is_said_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert f"--base-url: no server answers at {address}: Connection refused" in refused("--base-url", address)


def test_a_server_that_is_killed_in_an_answer_does_not_end_the_conversation(endless):
    with start("serve", endless, "--port", "0", *SMALL, ALONE) as process:
        try:
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
            with Terminal("chat", "--base-url", address, *ENDLESS) as terminal:
                ask(terminal, "abc")
                terminal.expect("<")
                process.kill()
                terminal.expect("(the connection broke: ")
                ask(terminal, "def")
                terminal.expect("(the connection broke: Connection refused)")
                ask(terminal, "/stats")
                terminal.expect("answers   0 ")
                leave(terminal)
        finally:
            process.kill()


class Breaking(BaseHTTPRequestHandler):
    """Answers without a length or chunks: the answer ends whenever the connection does."""

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer("text/event-stream", event("Half an ans"))

    def _answer(self, kind: str, body: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Uncounted(Breaking):
    """Knows `include_usage` and refuses any other stream option; its answer goes on until the client leaves."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["stream_options"] != {"include_usage": True}:
            error = {"error": {"message": "Unknown parameter in stream_options."}}
            self._answer("application/json", json.dumps(error), status=400)
        elif asked["messages"][-1]["content"] == "refuse this":
            self._answer("application/json", json.dumps({"error": {"message": "The prompt is too long."}}), status=400)
        else:
            self._answer("text/event-stream", event("one") + event(" two\n\n") + event("three"))
            self.connection.recv(1)  # until the client closes it


def event(content: str) -> str:
    chunk = {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of this kind."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_answer_that_breaks_off_without_a_word_is_none():
    with answering(Breaking) as address, Terminal("chat", "--base-url", address) as terminal:
        ask(terminal, "abc")
        terminal.expect("Half an ans")
        terminal.expect("(the answer broke off")
        leave(terminal)


def test_a_stopped_answer_of_a_server_that_counts_at_the_end_only_has_at_least_its_pieces():
    with answering(Uncounted) as address, Terminal("chat", "--base-url", address) as terminal:
        ask(terminal, "refuse this")
        terminal.expect("(HTTP 400: The prompt is too long.)")
        ask(terminal, "abc")
        terminal.expect("three")  # a block that is complete is shown at once, and so is the beginning of the next
        terminal.interrupt()
        terminal.expect("at least 3 tokens")
        ask(terminal, "/stats")
        terminal.expect("answers   1 of at least 3 tokens")
        leave(terminal)
