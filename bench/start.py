"""Measures how long servers take from their start to the first answer, and how much memory they use then.

    python bench/start.py FILE.gguf --rounds 3 --json bench/results/FILE.json

Penstock and llama.cpp's server take turns on the same file with the same context, with defaults for everything else. A
round starts a process, waits until it is ready, asks for 8 tokens after a prompt of 16, reads `/proc/PID/smaps_rollup`
of the process and its children, and ends it. The file is read once beforehand, so every run finds it in the page cache.
`anonymous` is memory of the process itself; `file` is its mappings of files, the model's file among them, which the
system may take back.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.llama_server import Served, post, wait_until_ready
from peers.process import NotInstalledError, program, version_of
from penstock.bench.machine import load_average, provenance
from penstock.contract.errors import EngineFault
from penstock.weights.locate import default_cache_dir

__all__ = ["main", "measure_round", "memory_of"]

_FIELDS = {"Rss": "resident", "Pss": "proportional", "Pss_Anon": "anonymous", "Pss_File": "file"}
_PROMPT = list(range(100, 116))

Command = Callable[[int], list[str]]
"""Returns the argument vector for a port."""


def memory_of(process: int) -> dict[str, int]:
    """Bytes of memory of a process and its children, by kind.

    Raises:
        EngineFault: this system does not report them.
    """
    total = dict.fromkeys(_FIELDS.values(), 0)
    for each in _family(process):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise EngineFault(f"memory of a process cannot be read here: {error}") from error
        for line in lines:
            key, _, value = line.partition(":")
            if key in _FIELDS:
                total[_FIELDS[key]] += int(value.split()[0]) * 1024
    return total


def _family(process: int) -> list[int]:
    """A process and all its descendants."""
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text(encoding="ascii").split():
            found += _family(int(child))
    return found


def _read_through(path: Path) -> int:
    """Read a file, so that it is in the page cache; returns its size."""
    with path.open("rb") as stream:
        return sum(len(piece) for piece in iter(lambda: stream.read(1 << 24), b""))


def measure_round(command: Command, path: str, body: dict[str, Any]) -> dict[str, float]:
    """Seconds until ready and until the first answer is complete, and the memory after it.

    Raises:
        EngineFault: the server ended, or refused the request.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        command(port), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        served = Served(f"http://127.0.0.1:{port}", process)
        if not wait_until_ready(served, pause=0.01):
            raise EngineFault(f"{command(port)[0]} ended with status {process.returncode} while it loaded")
        ready = time.perf_counter() - began
        post(served.url + path, body)
        answered = time.perf_counter() - began
        return {"ready_seconds": ready, "answered_seconds": answered, **memory_of(process.pid)}
    finally:
        process.terminate()
        process.wait(60)


def contenders(model: Path, context: int, peers: Path, kept: str) -> dict[str, tuple[Command, str, dict[str, Any]]]:
    """(command, path, request body) of each server by name. Ours keeps its KV blocks in the folder `kept`."""
    server = program(peers, "llama.cpp", "llama-server")
    ours = [sys.executable, "-m", "penstock", "serve", str(model), "--max-model-len", str(context), "--kv-store"]
    theirs = [str(server), "-m", str(model), "-c", str(context), "-np", "1", "--port"]
    common = {"prompt": _PROMPT, "temperature": 0}
    return {
        "penstock": (lambda port: [*ours, kept, "--port", str(port)], "/v1/completions", common | {"max_tokens": 8}),
        "llama.cpp": (lambda port: [*theirs, str(port)], "/completion", common | {"n_predict": 8}),
    }


def main() -> None:
    """Measure, print medians and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--context", type=int, default=2048, help="tokens (default: 2048)")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--peers-dir", type=Path, help="where llama.cpp is; by default in the cache")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    peers = options.peers_dir or default_cache_dir(os.environ) / "peers"
    try:
        with tempfile.TemporaryDirectory() as kept:
            head = {
                "kind": "start",
                **provenance(),
                "llama.cpp": version_of(program(peers, "llama.cpp", "llama-server")),
            }
            size = _read_through(options.model)
            servers = contenders(options.model, options.context, peers, kept)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for _ in range(options.rounds):
                for name, (command, path, body) in servers.items():
                    found[name].append(measure_round(command, path, body))
    except NotInstalledError as missing:
        hint = "run: python bench/compare.py --install --peer llama.cpp"
        raise SystemExit(f"llama-server is not installed in {peers}; {hint}") from missing
    except (EngineFault, OSError) as error:
        raise SystemExit(str(error)) from error
    for name, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        memory = ", ".join(f"{key} {middle[key] / 1e6:.0f} MB" for key in _FIELDS.values())
        print(f"{name}: answered after {middle['answered_seconds']:.2f} s; {memory}")
    if options.json is not None:
        what = {"model": options.model.name, "file_bytes": size, "context": options.context, "servers": found}
        record = head | what | {"load_average_after": load_average()}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
