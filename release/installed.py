"""Shows that an installed Penstock works: run by the Python that it was installed into.

    PYTHON installed.py [MODEL] [--requests N]

Runs the compiled kernels. With MODEL (a path, or "default") it also serves the model on a free port of 127.0.0.1, asks
one question, ends the server, and runs `penstock verify`. Uses the standard library only and imports nothing of this
repository, because it is copied to where it runs, for example a chroot. On an error: exit code 1 and one line.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import math
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")


def main() -> None:
    """Run the steps, and print one line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="without one nothing is served, and torch need not be there")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--patience", type=float, default=300, help="seconds that the server may take to start")
    given = parser.parse_args()
    say(f"Python {platform.python_version()} on {platform.machine()}, {platform.libc_ver()[1] or platform.system()}")
    there = [name for name in COMPILERS if shutil.which(name)]
    say(f"compiler: {', '.join(there) or 'none'}")
    say(f"penstock {version('penstock')}, {kernels()}")
    if given.model:
        say(f"torch {version('torch')}")
        model = [] if given.model == "default" else [given.model]
        say(serve(model, given.patience))
        say(verify(model, given.requests))


def say(line: str) -> None:
    """Print one line at once."""
    print(f"   {line}", flush=True)


def kernels() -> str:
    """Return the instruction sets that this processor runs; each has computed a correct norm."""
    module = importlib.import_module("penstock._native")
    for isa in module.isas():
        worst = norm_error(module, module.Cpu(isa, 1))
        if not worst < 1e-6:
            sys.exit(f"{isa}: an RMS norm is off by {worst}")
    return f"kernels that compute here: {', '.join(module.isas())}"


def norm_error(module: ModuleType, cpu: Any) -> float:
    """Return the largest relative error of compiled RMS norms of two rows of 67 numbers."""
    rows, width, eps = 2, 67, 1e-6
    x = [math.sin(place) for place in range(rows * width)]
    weight = [1 + place / width for place in range(width)]
    kinds = ctypes.c_float * len(x), ctypes.c_float * width
    stream, scale, out = kinds[0](*x), kinds[1](*weight), kinds[0]()
    cpu.rms_norm(
        rows,
        width,
        stream=module.Rows(ctypes.addressof(stream), width, 0),
        residual=None,
        weight=module.Vector(ctypes.addressof(scale), 0),
        bias=None,
        eps=eps,
        out=module.Rows(ctypes.addressof(out), width, 0),
    )
    wanted: list[float] = []
    for row in range(rows):
        values = list(stream[row * width : (row + 1) * width])
        root = math.sqrt(sum(value * value for value in values) / width + eps)
        wanted += [value / root * factor for value, factor in zip(values, weight, strict=True)]
    worst: float = max(abs(ours - theirs) for ours, theirs in zip(out, wanted, strict=True))
    return worst / max(map(abs, wanted))


def serve(model: list[str], patience: float) -> str:
    """Serve the model, and return what the server answered."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [PENSTOCK, "serve", *model, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        await_health(server, base, patience)
        name = json.loads(ask(f"{base}/v1/models"))["data"][0]["id"]
        body = {"model": name, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        answer = json.loads(ask(f"{base}/v1/completions", body))
    finally:
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=patience)
    if server.returncode != 0:
        sys.exit(f"the server ended with code {server.returncode}:\n{said.decode()}")
    return f"served {name}: {answer['choices'][0]['text']!r}, {answer['usage']['completion_tokens']} tokens"


def await_health(server: subprocess.Popen[bytes], base: str, patience: float) -> None:
    """Return when the server takes requests; otherwise end this program with the server's output."""
    end = time.monotonic() + patience
    while time.monotonic() < end and server.poll() is None:
        try:
            ask(f"{base}/health/ready")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    server.kill()
    sys.exit(f"the server did not start:\n{server.communicate()[0].decode()}")


def ask(url: str, body: dict[str, object] | None = None) -> bytes:
    """Send a request and return the answer's body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def verify(model: list[str], requests: int) -> str:
    """Run `penstock verify` and return its last line."""
    done = subprocess.run([PENSTOCK, "verify", *model, "--requests", str(requests)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"penstock verify ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return f"verify: {done.stdout.strip().splitlines()[-1]}"


if __name__ == "__main__":
    main()
