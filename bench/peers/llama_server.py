"""Runs `llama-server` on a file and asks it for tokens: greedy, token ids in and out, the top two at each position.

Ends the server that it started, and no other.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.contract.errors import EngineFault

__all__ = ["Greedy", "Served", "ask", "post", "serving", "wait_until_ready"]

_PATIENCE = 600.0
"""Seconds that a model may take to load, and an answer to come."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Holds what an engine generated.

    Attributes:
        tokens: token ids, including the one that ends a text.
        logprobs: log probabilities of the first tokens, or of all: llama-server reports none within a character.
        margins: for the same tokens, the log probability minus that of the next best token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving(program: Path, model: Path, options: Sequence[str]) -> Iterator[Served]:
    """Start a server on a free port and wait until it is ready; it is ended after the block.

    Raises:
        EngineFault: the server ended before it was ready.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            served = Served(f"http://127.0.0.1:{port}", process)
            if not wait_until_ready(served):
                log.seek(0)
                said = log.read().decode("utf-8", "replace").strip()[-600:]
                raise EngineFault(f"{program.name} ended with status {process.returncode} while it loaded: {said}")
            yield served
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(served: Served, path: str = "/health", pause: float = 0.05) -> bool:
    """Wait until the server answers `path` with 200; returns False if it ended instead.

    Raises:
        EngineFault: neither happens within ten minutes.
    """
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        if served.process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(served.url + path, timeout=_PATIENCE):
                return True
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503 while it loads
            time.sleep(pause)
    raise EngineFault(f"{served.url} did not become ready within {_PATIENCE:.0f} s")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post a JSON body and return the JSON answer.

    Raises:
        EngineFault: the request is refused.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as refusal:
        raise EngineFault(f"{url} answered {refusal.code}: {refusal.read()[:300]!r}") from refusal
    return found


def ask(served: Served, prompt: Sequence[int], new_tokens: int) -> Greedy:
    """Ask for the greedy continuation of a prompt; nothing is reused from earlier prompts."""
    body = {"prompt": list(prompt), "n_predict": new_tokens, "temperature": 0, "cache_prompt": False}
    answer = post(f"{served.url}/completion", body | {"n_probs": 2, "return_tokens": True})
    tokens, places = answer["tokens"], answer["completion_probabilities"]
    pairs = zip(tokens, places, strict=False)
    told = next((count for count, (token, place) in enumerate(pairs) if token != place["id"]), len(places))
    logprobs = tuple(place["logprob"] for place in places[:told])
    return Greedy(tuple(tokens), logprobs, tuple(_margin(place) for place in places[:told]))


def _margin(place: dict[str, Any]) -> float:
    others = [each["logprob"] for each in place["top_logprobs"] if each["id"] != place["id"]]
    return float(place["logprob"] - max(others)) if others else math.inf
