"""Measures what a store of KV blocks saves and costs: the first token after a kill, and steps while it is written.

    python bench/kept_kv.py first-token --rounds 3 --json bench/results/FILE.json
    python bench/kept_kv.py steps --rounds 5 --json bench/results/FILE.json
    python bench/kept_kv.py turns --rounds 5 --json bench/results/FILE.json

`first-token`: a server with an empty store is asked for one token after a prompt (`cold`), and then for the same again
(`memory`). When its blocks are in files it is killed (SIGKILL), and a second server is asked (`restart`). That one is
killed too, the files are dropped from the page cache, and a third is asked (`disk`). A short request warms up each one.

`steps`: the same load with and without a store, in turns, in separate processes. Every run makes the same plans, so
step number n computes the same in all runs. For each step, the best time of all rounds with a store is compared with
the best time of all rounds without, separately for steps that compute prompts and steps that decode. `noise` compares
the rounds without a store with each other, every other one with the rest.

`turns`: in one process, the thread that writes may work for some steps and has to wait for as many, in turns; there is
always something to write. So other work of the machine affects both alike. The time from the beginning of one step to
the beginning of the next is compared, by the mean of the middle nine tenths, with a 95 % bootstrap interval over turns.
`noise` compares turns in which the thread waits with each other, every other one with the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.llama_server import Served, post, wait_until_ready
from penstock.bench.machine import load_average, provenance
from penstock.contract.errors import EngineFault
from penstock.contract.plan import StepPlan, StepResult
from penstock.store import folders
from penstock.store.folders import block_files

__all__ = ["main", "measure_first_token", "measure_steps", "measure_turns"]

_SETTLED_SECONDS = 120.0
_STREAMS, _PROMPT, _NEW = 4, 384, 320
"""The load whose steps are measured: streams, prompt tokens and new tokens."""

_TURN = 8
"""Steps in which the thread that writes may work, or has to wait."""

_WARM = 32
"""Steps of each of the two requests that run before the load."""


def measure_first_token(model: str, tokens: int) -> dict[str, float]:
    """Seconds until an answer of one token arrives: cold, from memory, after a restart, and from the disk."""
    prompt = [random.Random(tokens).randrange(100, 30_000) for _ in range(tokens)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with _server(model, root) as url:
            found = {"cold": _ask(url, prompt), "memory": _ask(url, prompt)}
            _wait_for_files(root, tokens // 16)
        with _server(model, root) as url:
            found["restart"] = _ask(url, prompt)
        for path in _files(root):
            _put_out_of_cache(path)
        with _server(model, root) as url:
            found["disk"] = _ask(url, prompt)
    return found


def _ask(url: str, prompt: list[int]) -> float:
    began = time.perf_counter()
    post(url + "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - began


@contextmanager
def _server(model: str, root: Path) -> Iterator[str]:
    """Run a server and warm it up; yields its URL, and kills it when the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", model, "--port", str(port), "--kv-store", str(root)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            served = Served(f"http://127.0.0.1:{port}", process)
            if not wait_until_ready(served, pause=0.01):
                raise EngineFault(f"the server ended with status {process.returncode} while it loaded")
            post(served.url + "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0})
            yield served.url
        finally:
            process.send_signal(signal.SIGKILL)


def _files(root: Path) -> list[Path]:
    return [Path(entry.path) for folder in folders(root) for entry in block_files(folder.path)]


def _wait_for_files(root: Path, count: int) -> None:
    until = time.monotonic() + _SETTLED_SECONDS
    while len(_files(root)) < count:
        if time.monotonic() > until:
            raise EngineFault(f"only {len(_files(root))} of {count} blocks were written")
        time.sleep(0.05)


def _put_out_of_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure_steps(model: str, root: str, seed: int) -> tuple[list[tuple[int, float]], int]:
    """(positions, seconds) of each step of a load in a new process, and how many blocks were in files at its end."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 30_000) for _ in range(_PROMPT)] for _ in range(_STREAMS)]
    program = (
        "import json, sys; from penstock import LLM, SamplingParams\n"
        "model, root, prompts, new, warm = json.loads(sys.argv[1])\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    options = dict(kv_store=root, record=folder + '/trace', kv_cache_memory='512MiB', speculate=False)\n"
        "    with LLM(model, **options) as llm:\n"
        "        params = SamplingParams(max_tokens=warm, temperature=0, ignore_eos=True)\n"
        "        for _ in range(2): llm.generate([{'prompt_token_ids': [5, 6, 7]}], params, use_tqdm=False)\n"
        "        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)\n"
        "        llm.generate([{'prompt_token_ids': each} for each in prompts], params, use_tqdm=False)\n"
        "    print(open(folder + '/trace').read())\n"
    )
    order = json.dumps([model, root, prompts, _NEW, _WARM])
    said = subprocess.run([sys.executable, "-c", "import tempfile\n" + program, order], capture_output=True, check=True)
    records = [json.loads(line) for line in said.stdout.decode().splitlines() if line.startswith("{")]
    plans = [record["plan"] for record in records if "plan" in record]
    results = [record["result"] for record in records if "result" in record]
    steps = [
        (sum(row["count"] for row in plan["rows"]), result["seconds"])
        for plan, result in zip(plans, results, strict=True)
        if plan["rows"]
    ]
    written = [result["store"]["written"] for result in results if result["store"]]
    return steps[2 * _WARM :], written[-1] if written else 0


def _compare_steps(model: str, rounds: int) -> dict[str, Any]:
    """Compare steps with and without a store, in turns."""
    taken: dict[str, list[list[tuple[int, float]]]] = {"without": [], "with": []}
    written = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            order = list({"without": "off", "with": folder}.items())
            for name, root in order if seed % 2 else reversed(order):
                steps, count = measure_steps(model, root, seed=1)
                taken[name].append(steps)
                written += [count] if name == "with" else []
    sizes = [count for count, _ in taken["with"][0]]
    if any([count for count, _ in run] != sizes for runs in taken.values() for run in runs):
        raise EngineFault("the runs made different plans")
    best = {name: _best(runs) for name, runs in taken.items()}
    halves = _best(taken["without"][::2]), _best(taken["without"][1::2])
    found: dict[str, Any] = {"steps": len(sizes), "blocks_written_meanwhile": written}
    for kind, wanted in (("prompts", lambda count: count > _STREAMS), ("decoding", lambda count: count <= _STREAMS)):
        at = [number for number, count in enumerate(sizes) if wanted(count)]
        pairs = sorted(best["with"][number] / best["without"][number] for number in at)
        sums = {name: sum(best[name][number] for number in at) for name in best}
        found[kind] = {
            "steps": len(at),
            "seconds": sums,
            "with_over_without": sums["with"] / sums["without"],
            "median_step": statistics.median(pairs),
            "worst_step": pairs[-1],
            "noise": sum(halves[0][number] for number in at) / sum(halves[1][number] for number in at),
            "noise_of_worst_step": max(halves[0][number] / halves[1][number] for number in at),
        }
    return found | {"runs": taken}


def _best(runs: list[list[tuple[int, float]]]) -> list[float]:
    """The shortest time of each step in any run."""
    return [min(run[at][1] for run in runs) for at in range(len(runs[0]))]


def measure_turns(model: str, rounds: int) -> dict[str, Any]:
    """Measure steps of prompts and of decoding, while blocks are written and while they are not, in turns."""
    import torch  # noqa: F401 - before the library, whose start is not measured

    from penstock import LLM, SamplingParams
    from penstock.exec.runner import TorchRunner
    from penstock.store import writer

    may_write, begins = threading.Event(), []
    run = TorchRunner.run

    def noted(runner: TorchRunner, plan: StepPlan) -> StepResult:
        begins.append((time.perf_counter(), plan.num_tokens, may_write.is_set()))
        if len(begins) % _TURN == 0:
            (may_write.clear if may_write.is_set() else may_write.set)()
        return run(runner, plan)

    TorchRunner.run = noted  # type: ignore[method-assign]
    writer.give_way = may_write.wait  # type: ignore[assignment]
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"kv_store": folder, "kv_cache_memory": "512MiB", "speculate": False}
        with LLM(model, **options) as llm:
            for _ in range(rounds):
                prompts = [[rng.randrange(100, 30_000) for _ in range(4 * _PROMPT)] for _ in range(_STREAMS)]
                params = SamplingParams(max_tokens=_NEW, temperature=0, ignore_eos=True)
                llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
            may_write.set()
        written = len(_files(Path(folder)))
    found: dict[str, Any] = {"blocks_written": written}
    for kind, decodes in (("prompts", False), ("decoding", True)):
        turns: dict[bool, list[list[float]]] = {True: [], False: []}
        for first in range(_TURN, len(begins) - _TURN, _TURN):
            turn = begins[first : first + _TURN + 1]
            if all((count <= _STREAMS) is decodes for _, count, _ in turn):
                steps = [later[0] - each[0] for each, later in itertools.pairwise(turn[1:-1])]
                turns[turn[1][2]].append(steps)
        found[kind] = _compare_turns(turns)
    return found


def _compare_turns(turns: dict[bool, list[list[float]]]) -> dict[str, Any]:
    """How many times as long steps take while blocks are written."""
    rng = random.Random(2)
    ratio = _middle_mean(turns[True]) / _middle_mean(turns[False])
    drawn = sorted(
        _middle_mean(rng.choices(turns[True], k=len(turns[True])))
        / _middle_mean(rng.choices(turns[False], k=len(turns[False])))
        for _ in range(1000)
    )
    waiting = turns[False]
    return {
        "turns": {"writing": len(turns[True]), "waiting": len(waiting)},
        "step_seconds": {"writing": _middle_mean(turns[True]), "waiting": _middle_mean(waiting)},
        "writing_over_waiting": ratio,
        "between": [drawn[25], drawn[-26]],
        "noise": _middle_mean(waiting[::2]) / _middle_mean(waiting[1::2]),
    }


def _middle_mean(turns: list[list[float]]) -> float:
    steps = sorted(itertools.chain.from_iterable(turns))
    cut = len(steps) // 20
    return statistics.mean(steps[cut : len(steps) - cut])


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["first-token", "steps", "turns"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt (default: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    head = {"kind": f"kept-kv-{options.what}", **provenance(), "model": options.model}
    try:
        if options.what == "first-token":
            rounds = [measure_first_token(options.model, options.tokens) for _ in range(options.rounds)]
            middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            found: dict[str, Any] = {"tokens": options.tokens, "seconds": middle, "rounds": rounds}
            print(", ".join(f"{key} {value:.3f} s" for key, value in middle.items()))
        elif options.what == "turns":
            found = measure_turns(options.model, options.rounds)
            print(json.dumps(found, indent=1))
        else:
            found = _compare_steps(options.model, options.rounds)
            print(json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1))
    except (EngineFault, OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(str(error)) from error
    if options.json is not None:
        record = head | found | {"load_average_after": load_average()}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
