"""Compares routers of a fleet in simulated time: how much is found in prefix caches, and how long answers take.

    python bench/routers.py --replicas 2 --replicas 16 --requests 20000 --json bench/results/FILE.json
    python bench/routers.py --day --requests 100000 --json bench/results/FILE.json
    python bench/routers.py --trace conversation_trace.jsonl --replicas 100

Every replica is the scheduler that serves, on a simulated clock (`penstock.foresight`). Our router reads reports that
are up to half a second old; the others know exactly how many requests each replica has at that moment. By default,
conversations with shared system prompts keep each replica busy. With `--day`, a thousand replicas get a day of 24 hours
(`fleet_sim/day.py`). With `--trace`, they get the requests of a file, in any format that `penstock plan` reads.

Every router gets the same conversations, once for each seed, and its row has the medians over the seeds. Nothing is
measured in real time, so any machine gives the same figures, except for the processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fleet_sim.day import DAY_REPLICA, TracedMessages, drawn_day
from fleet_sim.replica import ReplicaConfig
from fleet_sim.rivals import RIVALS
from fleet_sim.simulation import FleetConfig, Talk, simulate
from fleet_sim.trace import BLOCK, TraceConfig, conversations
from penstock.bench.machine import load_average, provenance
from penstock.contract.errors import SetupError
from penstock.foresight.workloads import read_workload

__all__ = ["main", "measure", "table"]

WARM = 0.4
"""Share of the time after which figures count: conversations have begun to end by then. A day counts as a whole."""

DEFAULT_ROUTERS = tuple(name for name in RIVALS if not name.startswith("ours,"))
DAY_ROUTERS = ("ours", "two choices", "hash of conversation", "Ray's prefix router, threshold 16")
TRACE_ROUTERS = ("ours", "two choices", "hash of prefix", "Ray's prefix router, threshold 16")
"""Routers for `--trace`: a trace does not say which messages belong to one conversation."""


def measure(
    draw: Callable[[int], Iterable[Talk]], fleet: FleetConfig, names: Sequence[str], seeds: int, messages: int
) -> list[dict[str, Any]]:
    """A row for each router: the median of each figure over the seeds, and every run.

    Args:
        draw: draws the conversations from a seed.
        fleet: the fleet.
        names: names of the routers.
        seeds: how many seeds.
        messages: about how many messages a run has, for the progress bar.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tqdm(
        total=seeds * len(names) * messages, desc=f"{fleet.replicas} replicas", unit="message", disable=None
    ) as bar:
        for seed in range(seeds):
            talks = draw(seed)
            for name in names:
                bar.set_postfix_str(name)
                began = time.process_time()
                outcome = simulate(fleet, talks, RIVALS[name], seed=seed, tick=lambda _: bar.update())
                spent = time.process_time() - began
                of_run = outcome.figures(fleet.ends - fleet.warm)
                of_run |= {"processor_seconds": spent, "processor_seconds_a_request": spent / max(1, outcome.asked)}
                runs[name].append({"seed": seed} | of_run)
    return [
        {"router": name, "replicas": fleet.replicas}
        | {key: statistics.median(run[key] for run in each) for key in each[0] if key != "seed"}
        | {"runs": each}
        for name, each in runs.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    columns = "router|found|first token p50|p99|end to end p50|p99|failed|stayed|busiest over mean|busy|processor"
    lines = [f"| {' | '.join(columns.split('|'))} |", "|---" * len(columns.split("|")) + "|"]
    for row in rows:
        names = ("first_token_p50", "first_token_p99", "whole_p50", "whole_p99")
        times = " | ".join(f"{row[name]:,.3g} s" for name in names)
        failed = f"{row['failed'] / row['requests']:.2%}" if row["failed"] else "0"
        lines.append(
            f"| {row['router']} | {row['cached_share']:.1%} | {times} | {failed} | {row['stayed_share']:.1%} "
            f"| {row['busy_max_over_mean']:.2f} | {row['busy_share']:.1%} | {row['processor_seconds']:,.0f} s |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=int, action="append", help="size of a fleet; several times for several (2 and 16; day: 1000)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        action="append",
        help="turns of a run, about, warm-up included; several times for several (20000; day: 100000; trace: all)",
    )
    parser.add_argument("--rate", type=float, default=1.5, help="turns a second and replica; not with --day or --trace")
    days = parser.add_mutually_exclusive_group()
    days.add_argument("--day", action="store_true", help="a drawn day of 24 hours")
    days.add_argument("--trace", type=Path, help="a file with requests; see docs/foresight.md for formats")
    parser.add_argument("--fronts", type=int, default=1, help="routers that share the requests and do not speak")
    parser.add_argument("--slow", type=float, default=0.0, help="share of replicas with half the speed")
    parser.add_argument(
        "--losses", type=int, default=0, help="replicas that are lost on the way, and replaced after 20 s"
    )
    parser.add_argument("--seeds", type=int, help="runs of each router (3; day and trace: 1)")
    parser.add_argument("--router", action="append", choices=list(RIVALS), help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="where the record is written")
    return parser


def _rows(options: argparse.Namespace, replicas: int, requests: int) -> list[dict[str, Any]]:
    """The rows for one number of replicas."""
    day = options.day or options.trace is not None
    replica = DAY_REPLICA if day else ReplicaConfig()
    names, said = list(DEFAULT_ROUTERS), {}
    if options.trace is not None:
        messages = TracedMessages(read_workload(options.trace, requests), replica.context)
        names, seconds, said = list(TRACE_ROUTERS), messages.seconds, {"file": options.trace.name}
        requests = len(messages)

        def draw(seed: int) -> Iterable[Talk]:  # noqa: ARG001 (a trace has no chance in it)
            return messages
    else:
        trace = _day_or_load(options, replicas, requests)
        names = list(DAY_ROUTERS) if day else names
        seconds, said = trace.seconds, asdict(trace)

        def draw(seed: int) -> Iterable[Talk]:
            return conversations(trace, seed)

    warm = 0.0 if day else WARM * seconds
    fleet = FleetConfig(
        replicas=replicas,
        fronts=options.fronts,
        slow=options.slow,
        losses=tuple(warm + seconds * 0.05 + 15.0 * each for each in range(options.losses)),
        warm=warm,
        ends=seconds,
        replica=replica,
    )
    rows = measure(draw, fleet, options.router or names, options.seeds or (1 if day else 3), requests)
    return [{"trace": said, "fleet": asdict(fleet)} | row for row in rows]


def _day_or_load(options: argparse.Namespace, replicas: int, requests: int) -> TraceConfig:
    if options.day:
        return drawn_day(requests)
    rate = options.rate * replicas
    return TraceConfig(seconds=requests / rate, requests_per_second=rate, tenants=20 + 5 * replicas)


def main() -> None:
    """Simulate and report."""
    parser = _parser()
    options = parser.parse_args()
    head = provenance()
    day = options.day or options.trace is not None
    rows: list[dict[str, Any]] = []
    for replicas in options.replicas or ([1000] if day else [2, 16]):
        for requests in options.requests or [0 if options.trace is not None else 100_000 if day else 20_000]:
            try:
                own = _rows(options, replicas, requests)
            except SetupError as error:
                parser.error(str(error))
            print(f"\n{replicas} replicas, {own[0]['asked']:,.0f} messages\n\n{table(own)}", flush=True)
            rows += own
    if options.json is not None:
        record = head | {"kind": "routers", "block": BLOCK, "rows": rows}
        text = json.dumps(record | {"load_average_after": load_average()}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
