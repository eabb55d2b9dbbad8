"""Compares routers of a fleet of replicas, in made-up time: what is found in prefix caches, and first tokens.

    python bench/routers.py --replicas 2 --replicas 16 --requests 20000 --json bench/results/FILE.json

Conversations with shared system prompts go to replicas that read prompts one after the other, cache prefixes and
decode; see `fleet_sim`. Our router reads reports that are up to half a second old; the others know how many requests
each replica has at that very moment. Every router gets the same conversations, once for each seed, and its row has the
medians over the seeds. Nothing is measured in real time, so any machine gives the same figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fleet_sim.replica import ReplicaConfig
from fleet_sim.rivals import RIVALS
from fleet_sim.simulation import FleetConfig, simulate
from fleet_sim.trace import BLOCK, TraceConfig, conversations
from penstock.bench.machine import load_average, provenance

__all__ = ["main", "measure", "table"]

WARM = 0.4
"""Share of the time after which figures count: conversations have begun to end by then."""


def measure(trace: TraceConfig, fleet: FleetConfig, names: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """A row for each router: the median of each figure over the seeds, and every run."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with tqdm(total=seeds * len(names), desc=f"{fleet.replicas} replicas", unit="run", disable=None) as bar:
        for seed in range(seeds):
            talks = conversations(trace, seed)
            for name in names:
                bar.set_postfix_str(name)
                outcome = simulate(fleet, talks, RIVALS[name], seed=seed, tick=lambda _: bar.refresh())
                runs[name].append({"seed": seed} | outcome.figures(fleet.ends - fleet.warm))
                bar.update()
    return [
        {"router": name, "replicas": fleet.replicas, "requests_per_second": trace.requests_per_second}
        | {key: statistics.median(run[key] for run in each) for key in each[0] if key != "seed"}
        | {"runs": each}
        for name, each in runs.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| router | prompt tokens found | first token p50 | p99 | failed | turns that stayed | busiest over mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = f"{row['first_token_p50'] * 1e3:,.0f} ms | {row['first_token_p99'] * 1e3:,.0f} ms"
        failed = f"{row['failed'] / row['requests']:.2%}" if row["failed"] else "0"
        lines.append(
            f"| {row['router']} | {row['cached_share']:.1%} | {times} | {failed} "
            f"| {row['stayed_share']:.1%} | {row['busy_max_over_mean']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, action="append", help="size of a fleet; several times for several")
    parser.add_argument("--requests", type=int, default=20_000, help="turns of a run, about, warm-up included")
    parser.add_argument("--rate", type=float, default=1.5, help="turns a second and replica")
    parser.add_argument("--fronts", type=int, default=1, help="routers that share the requests and do not speak")
    parser.add_argument("--slow", type=float, default=0.0, help="share of replicas with half the speed")
    parser.add_argument(
        "--losses", type=int, default=0, help="replicas that are lost on the way, and replaced after 20 s"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--router", action="append", choices=list(RIVALS), help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    head = provenance()
    rows: list[dict[str, Any]] = []
    for replicas in options.replicas or [2, 16]:
        seconds = options.requests / (options.rate * replicas)
        losses = tuple(seconds * (WARM + 0.05) + 15.0 * each for each in range(options.losses))
        trace = TraceConfig(seconds=seconds, requests_per_second=options.rate * replicas, tenants=20 + 5 * replicas)
        fleet = FleetConfig(
            replicas=replicas,
            fronts=options.fronts,
            slow=options.slow,
            losses=losses,
            warm=seconds * WARM,
            ends=seconds,
        )
        own = measure(trace, fleet, options.router or list(RIVALS), options.seeds)
        print(f"\n{replicas} replicas\n\n{table(own)}", flush=True)
        rows += [{"trace": asdict(trace), "fleet": asdict(fleet)} | row for row in own]
    if options.json is not None:
        record = head | {"kind": "routers", "block": BLOCK, "replica": asdict(ReplicaConfig()), "rows": rows}
        text = json.dumps(record | {"load_average_after": load_average()}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
