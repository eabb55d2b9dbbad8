"""Measures how long a request waits in a server of several models when its model is not loaded.

    python bench/switching.py --rounds 5 --json bench/results/FILE.json

One model in three forms (its file's, int8, bfloat16) is served as three models, of which two may be loaded at once. For
each model the time of an answer of one token is measured: `loaded`, if it is loaded; `room`, if it has to be loaded and
there is room; `place`, if another has to be unloaded first. Requests are sent one by one.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.llama_server import Served, post, wait_until_ready
from penstock.bench.machine import load_average, provenance
from penstock.contract.errors import EngineFault

__all__ = ["main", "measure"]

FORMS = ("file", "int8", "none")


def measure(url: str) -> dict[str, dict[str, float]]:
    """Seconds of each kind of answer, by the form asked for. Nothing is loaded at the beginning and at the end."""
    found: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for place, form in enumerate(FORMS):
        other, third = FORMS[place - 1], FORMS[place - 2]
        found[form]["room"] = _ask(url, form)
        found[form]["loaded"] = _ask(url, form)
        for each in (other, third):  # the second of these unloads `form`
            _ask(url, each)
        found[form]["place"] = _ask(url, form)
        for each in FORMS:
            post(url + "/models/unload", {"model": each})
    return found


def _ask(url: str, model: str) -> float:
    began = time.perf_counter()
    post(url + "/v1/completions", {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - began


@contextmanager
def _server(model: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        entries = [{"model": model, "served-model-name": [form], "quantization": form} for form in FORMS]
        file = Path(folder) / "models.yaml"
        file.write_text(json.dumps({"models": entries}), encoding="utf-8")  # JSON is valid YAML
        options = ["--max-loaded-models", "2", "--kv-cache-memory", "512MiB", "--kv-store", "off", "--port", str(port)]
        command = [sys.executable, "-m", "penstock", "serve", "--models-file", str(file), *options]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                served = Served(f"http://127.0.0.1:{port}", process)
                if not wait_until_ready(served, pause=0.01):
                    raise EngineFault(f"the server ended with status {process.returncode} before it listened")
                yield served.url
            finally:
                process.send_signal(signal.SIGTERM)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    head = provenance()
    with _server(options.model) as url:
        runs = [measure(url) for _ in range(options.rounds)]
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        row: dict[str, Any] = {"quantization": form}
        for kind in ("loaded", "room", "place"):
            seconds = [run[form][kind] for run in runs]
            row[kind] = {"median": statistics.median(seconds), "lowest": min(seconds), "highest": max(seconds)}
        rows.append(row)
        said = ", ".join(f"{kind} {row[kind]['median']:.2f} s" for kind in ("loaded", "room", "place"))
        print(f"{form}: {said}", flush=True)
    if options.json is not None:
        record = head | {"kind": "switching", "model": options.model, "rows": rows, "runs": runs}
        text = json.dumps(record | {"load_average_after": load_average()}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
