"""Measures a decode step's cost in Python: function calls, which repeat exactly, and processor time of its thread.

    python bench/step_calls.py [PYTHON ...] [--streams 1 --streams 8] [--temperature 1] [--functions 20]

Each PYTHON belongs to an installation to measure; the default is the one that runs this. The model is random and so
small that computing it costs next to nothing: what remains is the engine. Every installation holds it in a process of
its own, and they are measured in turns, so that a machine that slows down affects all alike. Calls are the mean of 64
steps, in which every stream fills 4 blocks; microseconds are processor time of the thread that steps, as the least and
the median of all rounds. Only the interface that all installations share is used: `LLM`, `SamplingParams`,
`add_request`, `step`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_random_checkpoint import configure, write_checkpoint
from worker import Worker

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 258,
    "max_position_embeddings": 256,
}

WORKER = """
import collections, json, random, sys, time
from penstock import LLM, SamplingParams

STEPS = 64
llm = LLM(sys.argv[1], quantization="none", threads=1, max_num_seqs=64, max_num_batched_tokens=4096)
print("{}", flush=True)
for line in sys.stdin:
    load = json.loads(line)
    draw = random.Random(load["seed"])
    params = SamplingParams(temperature=load["temperature"], max_tokens=STEPS + 16, ignore_eos=True, seed=1)
    for _ in range(load["streams"]):
        llm.add_request([draw.randrange(256) for _ in range(32)], params)
    for _ in range(8):  # the prefill, and some steps to warm up
        llm.step()
    calls, compiled = collections.Counter(), collections.Counter()
    def count(frame, event, function):
        if event == "call":
            code = frame.f_code
            calls[code.co_filename.rpartition("penstock/")[2] + ":" + code.co_qualname] += 1
        elif event == "c_call":
            compiled[getattr(function, "__qualname__", str(function))] += 1
    if load["count"]:
        sys.setprofile(count)
    began = time.thread_time()
    for _ in range(STEPS):
        llm.step()
    seconds = time.thread_time() - began
    sys.setprofile(None)
    while llm.has_unfinished_requests():
        llm.step()
    found = {"seconds": seconds / STEPS}
    for name, counter in (("calls", calls), ("compiled", compiled)):
        found[name] = {function: times / STEPS for function, times in counter.most_common()}
    print(json.dumps(found), flush=True)
"""


def measure(workers: list[Worker], streams: int, temperature: float, rounds: int) -> list[dict[str, Any]]:
    """The cost of each worker's step: calls by function, and microseconds in every round."""
    load = {"streams": streams, "temperature": temperature}
    for worker in workers:
        worker.run(load | {"seed": 0, "count": 0})  # warms up
    counted = [worker.run(load | {"seed": 1, "count": 1}) for worker in workers]
    taken: list[list[float]] = [[] for _ in workers]
    for seed in range(2, rounds + 2):
        for worker, microseconds in zip(workers, taken, strict=True):
            microseconds.append(1e6 * worker.run(load | {"seed": seed, "count": 0})["seconds"])
    return [found | {"microseconds": each} for found, each in zip(counted, taken, strict=True)]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="*", default=[sys.executable], help="of an installation [this one]")
    parser.add_argument("--streams", type=int, action="append", help="several times [1, 8, 32]")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--functions", type=int, default=0, help="print so many of the functions called most")
    given = parser.parse_args()
    print("streams  Python calls  compiled calls  us, least  us, median  installation")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_checkpoint(model, configure("llama", SIZES))
        workers = [Worker(python, WORKER, str(model)) for python in given.python]
        for streams in given.streams or [1, 8, 32]:
            rows = measure(workers, streams, given.temperature, given.rounds)
            for python, row in zip(given.python, rows, strict=True):
                python_calls, compiled_calls = sum(row["calls"].values()), sum(row["compiled"].values())
                least, median = min(row["microseconds"]), statistics.median(row["microseconds"])
                print(f"{streams:7} {python_calls:13.1f} {compiled_calls:15.1f} {least:10.0f} {median:11.0f}  {python}")
                for function, times in list(row["calls"].items())[: given.functions]:
                    print(f"{times:21.2f}  {function}")
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
