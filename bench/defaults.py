"""What serving costs with all defaults on: the default server against the same engine as a library, in turns.

    python bench/defaults.py --streams 1 --streams 8 --streams 32 --rounds 5 --json bench/results/FILE.json

Both run at the same time with the same options; while one is measured, the other sleeps. A round is library, server,
server, library, so that a machine that slows down affects both alike; a round's ratio is the ratio of the two sums.
Every prompt is random and used once, so that no cache helps; every answer has exactly the requested length. Server
requests take the whole path of a client's request: HTTP, guard, limits, metrics, observation, text, JSON. With
`--stream` each token is a separate event. The client is a plain socket reader in this process, so its small cost counts
against the server. Options of the server follow `--`, to see what one default costs: `-- --kv-store off`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from penstock import LLM, SamplingParams
from penstock.bench.machine import provenance
from penstock.contract.config import DEFAULT_MODEL

TURNS = ("library", "server", "server", "library")


@dataclass(frozen=True)
class Load:
    """How many requests are sent at once, with how many prompt tokens and new tokens each."""

    streams: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, draw: random.Random) -> list[list[int]]:
        """Random prompts that neither engine has seen."""
        return [[draw.randrange(100, 10_000) for _ in range(self.prompt_tokens)] for _ in range(self.streams)]


@contextmanager
def server(model: str, options: list[str]) -> Iterator[str]:
    """Run `penstock serve` with these options, a port and a folder of its own for KV blocks; yields its URL."""
    command = [sys.executable, "-m", "penstock", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryDirectory() as kept:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "PENSTOCK_KV_STORE": kept}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        try:
            assert process.stdout is not None
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line)))
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def library_seconds(llm: LLM, load: Load, prompts: list[list[int]]) -> float:
    """Seconds from the first request to the last token."""
    params = SamplingParams(temperature=0, max_tokens=load.new_tokens, ignore_eos=True)
    began = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(answer.outputs[0].token_ids) == load.new_tokens for answer in answers)
    return seconds


def server_seconds(url: str, load: Load, prompts: list[list[int]], *, stream: bool) -> float:
    """As `library_seconds`, over HTTP, with all requests at once."""
    body = {"temperature": 0, "max_tokens": load.new_tokens, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    requests = [_request(url, body | {"prompt": prompt}) for prompt in prompts]
    began = time.perf_counter()
    answers = _answers(url, requests)
    seconds = time.perf_counter() - began
    wanted = b'"completion_tokens":%d' % load.new_tokens
    assert all(wanted in answer for answer in answers), answers[0][-300:]
    return seconds


def _request(url: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content


def _answers(url: str, requests: list[bytes]) -> list[bytes]:
    """Send all requests at once; returns the answer to each, read until the server closes the connection."""
    parts: list[list[bytes]] = [[] for _ in requests]
    with selectors.DefaultSelector() as selector:
        for request, its_parts in zip(requests, parts, strict=True):
            connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ, its_parts)
        while selector.get_map():
            for key, _ in selector.select():
                connection = cast("socket.socket", key.fileobj)
                came = connection.recv(1 << 16)
                if came:
                    key.data.append(came)
                else:
                    selector.unregister(connection)
                    connection.close()
    return [b"".join(its_parts) for its_parts in parts]


def measure(model: str, loads: list[Load], rounds: int, options: list[str], *, stream: bool) -> list[dict[str, object]]:
    """One row for each load: the seconds of both in every round, and the ratios of their rates."""
    draw = random.Random(0)
    rows = []
    with LLM(model) as llm, server(model, options) as url:
        for load in loads:
            each = []
            for _ in range(rounds + 1):  # the first warms up both
                taken = {"library": 0.0, "server": 0.0}
                for turn in TURNS:
                    prompts = load.prompts(draw)
                    if turn == "library":
                        taken[turn] += library_seconds(llm, load, prompts)
                    else:
                        taken[turn] += server_seconds(url, load, prompts, stream=stream)
                each.append(taken)
            ratios = [taken["library"] / taken["server"] for taken in each[1:]]
            tokens = 2 * load.streams * load.new_tokens
            rates = {
                name: tokens / statistics.median(taken[name] for taken in each[1:]) for name in ("library", "server")
            }
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            print(
                f"{load.streams:3d} streams: library {rates['library']:7.1f}, server {rates['server']:7.1f} tokens/s;"
                f" server / library {middle:.3f} ({low:.3f} to {high:.3f})"
            )
            rows.append({"streams": load.streams, "rounds": each[1:], "server_over_library": [low, middle, high]})
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, action="append")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream", action="store_true", help="answers in events instead of whole")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    given = parser.parse_args()
    about = {
        "provenance": provenance(),
        "streamed": given.stream,
        "model": given.model,
        "options": given.options,
    }  # the load average is from before the run
    loads = [Load(streams, given.prompt_tokens, given.new_tokens) for streams in given.streams or [1, 8, 32]]
    rows = measure(given.model, loads, given.rounds, given.options, stream=given.stream)
    if given.json:
        about |= {"prompt_tokens": given.prompt_tokens, "new_tokens": given.new_tokens}
        given.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
