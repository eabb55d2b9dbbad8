"""Measures two installations of Penstock in turns: what a change did to rates, start and memory.

    python bench/turns.py OLD/.venv/bin/python NEW/.venv/bin/python --rounds 5 --json bench/results/FILE.json

For each form of the weights both hold the model at the same time, each in a process of its own; while one is measured,
the other sleeps. A round is old, new, new, old, within seconds, so that a machine that slows down affects both alike;
a round's ratio is the ratio of the two sums. Starts are whole `penstock serve` processes: seconds until they listen,
and resident memory then. Only the interface that both share is used: `LLM`, `SamplingParams`, `add_request`, `step`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock.bench.machine import provenance
from penstock.contract.config import DEFAULT_MODEL
from worker import Worker

SIDES = ("old", "new")
TURNS = ("old", "new", "new", "old")

WORKER = """
import json, random, subprocess, sys, time
from pathlib import Path
import penstock
from penstock import LLM, SamplingParams

model, form, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(model, quantization=form, max_num_batched_tokens=limit)
folder = Path(penstock.__file__).parent
commit = subprocess.run(["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                        capture_output=True, text=True).stdout.strip()
print(json.dumps({"commit": commit}), flush=True)
for line in sys.stdin:
    load = json.loads(line)
    draw = random.Random(load["seed"])
    params = SamplingParams(temperature=0, max_tokens=load["new_tokens"], ignore_eos=True)
    for _ in range(load["streams"]):
        llm.add_request([draw.randrange(100, 10_000) for _ in range(load["prompt_tokens"])], params)
    started, counts = time.perf_counter(), {}
    def step():
        for output in llm.step():
            if output.outputs[0].token_ids:
                counts[output.request_id] = len(output.outputs[0].token_ids)
    while len(counts) < load["streams"]:
        step()
    prefilled, early = time.perf_counter(), sum(counts.values())
    while llm.has_unfinished_requests():
        step()
    ended = time.perf_counter()
    assert all(count == load["new_tokens"] for count in counts.values()), counts
    peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    decoded = sum(counts.values()) - early
    print(json.dumps({"prefill_s": prefilled - started, "decode_s": ended - prefilled, "decoded": decoded,
                      "peak_mib": int(peak) / 1024}), flush=True)
"""


@dataclass(frozen=True)
class Load:
    """How many requests are sent at once, with how many prompt tokens and new tokens each."""

    streams: int
    prompt_tokens: int
    new_tokens: int


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def rates(workers: dict[str, Worker], load: Load, rounds: int) -> dict[str, Any]:
    """Rounds of one load; `new_over_old` is the ratio of the rates, above 1 if the new installation is faster."""
    each = []
    for index in range(rounds + 1):  # the first warms up both
        # No worker gets a prompt twice, because it would find it in its prefix cache.
        seeds = (2 * index, 2 * index, 2 * index + 1, 2 * index + 1)
        turns = [
            (side, workers[side].run(vars(load) | {"seed": seed})) for side, seed in zip(TURNS, seeds, strict=True)
        ]
        each.append(
            {side: {k: [taken[k] for name, taken in turns if name == side] for k in turns[0][1]} for side in SIDES}
        )
    row: dict[str, Any] = vars(load) | {"rounds": each[1:], "new_over_old": {}}
    for phase in ("prefill_s", "decode_s"):
        ratios = [sum(taken["old"][phase]) / sum(taken["new"][phase]) for taken in each[1:]]
        row["new_over_old"][phase.removesuffix("_s")] = spread(ratios)
    row["peak_mib"] = {side: each[-1][side]["peak_mib"][-1] for side in SIDES}
    return row


def start(python: str, model: str, form: str) -> dict[str, float]:
    """Start one `penstock serve`: seconds until it listens, and resident memory then."""
    command = [python, "-m", "penstock", "serve", model, "--port", "0", "--quantization", form]
    began = time.perf_counter()
    env = {**os.environ, "PENSTOCK_KV_STORE": "off"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, env=env)
    assert process.stdout is not None
    if not any(re.search(r"http://[\d.:]+", line) for line in process.stdout):
        sys.exit(f"{' '.join(command)} ended before it listened")
    seconds = time.perf_counter() - began
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    process.terminate()
    process.communicate(timeout=60)
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return {"seconds": seconds, "resident_mib": int(found[1]) / 1024}


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="the python of one installation")
    parser.add_argument("new", help="the python of the other")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--form", action="append", help="as --quantization; several times [file, int8, none]")
    parser.add_argument("--streams", type=int, action="append", help="several times [1, 8, 32]")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="of each installation and form; 0 for none")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pythons = {"old": given.old, "new": given.new}
    record: dict[str, Any] = {"provenance": provenance(), "model": given.model, "rates": [], "starts": []}
    forms, streams = given.form or ["file", "int8", "none"], given.streams or [1, 8, 32]
    progress = tqdm(total=len(forms) * (len(streams) + (given.starts > 0)))
    for form in forms:
        workers = {
            side: Worker(python, WORKER, given.model, form, str(given.max_num_batched_tokens))
            for side, python in pythons.items()
        }
        record["commits"] = {side: worker.ready["commit"] for side, worker in workers.items()}
        for count in streams:
            row = rates(workers, Load(count, given.prompt_tokens, given.new_tokens), given.rounds)
            record["rates"].append({"form": form} | row)
            progress.update()
            ratios = {
                k: f"{v['median']:.3f} ({v['lowest']:.3f} to {v['highest']:.3f})"
                for k, v in row["new_over_old"].items()
            }
            tqdm.write(f"{form:5} {count:3} streams, new / old: decode {ratios['decode']}, prefill {ratios['prefill']}")
        for worker in workers.values():
            worker.close()
        if given.starts:
            taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
            for index in range(given.starts):
                for side in SIDES if index % 2 else reversed(SIDES):
                    taken[side].append(start(pythons[side], given.model, form))
            record["starts"].append({"form": form} | taken)
            progress.update()
            for key in ("seconds", "resident_mib"):
                old, new = (statistics.median(each[key] for each in taken[side]) for side in SIDES)
                tqdm.write(f"{form:5} start, {key}: {old:.2f} old, {new:.2f} new")
    progress.close()
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
