"""The process: it drains, ends, and lives with the limits that a system sets it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from server_harness import free_port

STREAMS = 32
LONG = 600
PATIENCE = 60.0
BODY = {"prompt": "x", "stream": True}


@dataclass
class Process:
    """A server's process, and what is asked of it."""

    process: subprocess.Popen[str]
    url: str
    probes: str

    def stream(self, http: httpx.Client, begun: list[str]) -> str:
        """The text of one answer; says when the first piece has come."""
        with http.stream("POST", f"{self.url}/v1/completions", json=BODY) as response:
            assert response.status_code == 200
            text = ""
            for line in response.iter_lines():
                text += line
                begun.append(line)
        return text

    def signal(self) -> None:
        """Send SIGTERM, and wait until it takes effect."""
        self.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{self.probes}/health/ready").status_code == 503)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("x")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Exit code, and what it wrote to standard error."""
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        return self.process.wait(PATIENCE), said


def until(condition: Callable[[], object]) -> None:
    last = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


@contextmanager
def served(drain_seconds: int = LONG, files: int = 0) -> Iterator[Process]:
    folder = Path(__file__).parent
    port = free_port()

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    with subprocess.Popen(
        [sys.executable, str(folder / "server_process.py"), str(port), str(drain_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])},
        preexec_fn=few_files if files else None,
    ) as process:
        try:
            assert process.stdout is not None
            yield Process(process, process.stdout.readline().strip(), f"http://127.0.0.1:{port}")
        finally:
            process.kill()


@contextmanager
def streams(server: Process, count: int) -> Iterator[list[Future[str]]]:
    """`count` answers, each of which has begun."""
    begun: list[list[str]] = [[] for _ in range(count)]
    limits = httpx.Limits(max_connections=count)
    with httpx.Client(timeout=PATIENCE, limits=limits) as http, ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(server.stream, http, each) for each in begun]
        try:
            until(lambda: all(begun))
            yield answers
        except BaseException:
            server.process.kill()  # else the pool would wait for the answers
            raise


def test_a_signal_drains_every_stream_and_refuses_what_is_new():
    with (
        served() as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as kept,
        streams(server, STREAMS) as answers,
        socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as silent,
    ):
        assert kept.get("/health/ready").json() == {"status": "ready", "reason": ""}
        server.signal()
        ready = kept.get("/health/ready")  # on a connection opened before
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is shutting down")
        assert ready.json()["error"]["code"] == "shutting_down"
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 30_000}, timeout=PATIENCE)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert (refused.headers["connection"], refused.json()["error"]["code"]) == ("close", "shutting_down")
        assert httpx.post(f"{server.url}/v1/messages", json={}).json()["error"]["type"] == "overloaded_error"
        assert httpx.get(f"{server.url}/v1/models").headers["connection"] == "close"
        assert httpx.get(f"{server.probes}/health/live").status_code == 200
        assert "vllm:num_requests_running" in httpx.get(f"{server.probes}/metrics").text
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        silent.settimeout(PATIENCE)
        assert silent.recv(1000).startswith(b"HTTP/1.1 503")
        assert not any(answer.done() for answer in answers)
        server.go()
        for answer in answers:
            text = answer.result(PATIENCE)
            assert '"text":"a"' in text
            assert '"text":"b"' in text
            assert "data: [DONE]" in text
        code, said = server.end()
    assert code == 0
    assert "left" not in said
    assert "Traceback" not in said


def test_what_outlasts_the_drain_is_told_so_and_nobody_is_left():
    with served(drain_seconds=0) as server, streams(server, 2) as answers:
        server.process.send_signal(signal.SIGINT)
        for answer in answers:
            assert '"code":"shutting_down"' in answer.result(PATIENCE)
        code, said = server.end()
    assert code == 0
    assert "2 answers are not finished and end with an error" in said
    assert "left ['cmpl-" in said
    assert "Traceback" not in said
    assert "CancelledError" not in said


def test_a_second_signal_ends_at_once():
    with served() as server, streams(server, 2) as answers:
        server.signal()
        server.process.send_signal(signal.SIGTERM)
        code, said = server.end()  # the drain would take ten minutes
        for answer in answers:
            assert "shutting_down" in answer.result(PATIENCE)
    assert code == 0
    assert "Traceback" not in said


def test_a_log_that_nobody_reads_any_more_changes_nothing():
    with served() as server:
        server.process.stdout.close()
        server.process.stderr.close()
        server.go()
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
            assert answer.json()["choices"][0]["text"] == "ab"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def test_with_few_open_files_connections_are_refused_and_then_taken_again():
    with served(files=64) as server:
        held = []
        for _ in range(100):
            connection = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), PATIENCE)
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            held.append(connection)
        answers = [_answer(each) for each in held]
        assert {b"HTTP/1.1 200", b"HTTP/1.1 429"} <= set(answers) <= {b"HTTP/1.1 200", b"HTTP/1.1 429", b""}
        assert httpx.get(f"{server.probes}/health/ready").status_code == 200
        for connection in held:
            connection.close()
        server.go()
        until(lambda: httpx.get(f"{server.url}/health/live").status_code == 200)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        code, said = server.end()
    assert code == 0
    assert "connections are capped at" in said
    assert "Traceback" not in said


def _answer(connection: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return connection.recv(1000)[:12]
    return b""
