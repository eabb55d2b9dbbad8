"""`penstock plan`: how much of a workload this machine holds, and what would hold more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from penstock.bench.machine import cpus, provenance
from penstock.cli.bench_report import json_option, report
from penstock.cli.sections import complete_model
from penstock.contract.errors import ConfigError

if TYPE_CHECKING:
    from penstock.foresight.planning import Limit, Machine, Question
    from penstock.foresight.workloads import Drawn, Workload

__all__ = ["command"]

_CURVE = (0.5, 0.7, 0.85, 1.0, 1.1, 1.25)
"""Rates at which latencies are reported, as multiples of the limit."""

_BETTER = 1.03
"""An option must hold this many times the rate held without it: the bisection is no more precise."""

_SELDOM = 0.01
"""Requests a second, so few that they hardly overlap: latencies are reported at this rate if no rate holds."""


@click.command("plan")
@click.argument("model", shell_complete=complete_model)
@click.argument("serve_options", nargs=-1, metavar="[-- SERVE OPTIONS]")
@click.option(
    "--workload",
    default="chat",
    show_default=True,
    metavar="FILE|chat|long|shared",
    help="A record, a published trace (Azure, Mooncake, Qwen-Bailian) or a trace of bench serve; or a generated"
    " workload: chat (conversations), long (long prompts with short answers) or shared (prompts that share prefixes).",
)
@click.option(
    "--slo", default="ttft=1s,itl=100ms", show_default=True, help="Bounds on ttft, itl and e2e, as clients see them."
)
@click.option(
    "--quantile",
    type=click.FloatRange(1, 100, max_open=True),
    default=99.0,
    show_default=True,
    help="Percentage of requests, or of gaps between tokens, that must be within each bound.",
)
@click.option(
    "--requests",
    type=click.IntRange(20),
    default=200,
    show_default=True,
    help="Requests in a simulated day; a file is cut after this many.",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Simulated days for each figure.")
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes that simulate at once; 0: one per CPU.")
@click.option(
    "--options/--no-options",
    "compares",
    default=True,
    show_default=True,
    help="Also look for better options, and for what more memory or a second machine would bring; takes longest.",
)
@click.option("--calibrate", is_flag=True, help="Measure this machine's steps again, instead of using kept ones.")
@click.option(
    "--calibration-seconds",
    type=click.FloatRange(5),
    default=60.0,
    show_default=True,
    help="Seconds for which steps are measured, the first time.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot latency against rate in this file.")
@json_option
def command(model: str, serve_options: tuple[str, ...], target: Path | None, **options: Any) -> None:
    """Find how many requests a second of a workload this machine holds within bounds, and what would hold more.

    The first run measures the steps of a server of MODEL for a minute, and keeps them for later plans. Then days are
    simulated: the scheduler that serves, on a simulated clock, with the measured steps. Each figure is the median of
    several days, with the lowest and the highest. Speculation is off: random prompts leave nothing to guess. Put
    options of `penstock serve` after `--`.
    """
    from penstock.bench.plotting import check_suffix, plotting
    from penstock.foresight import planning  # numpy is slow to import
    from penstock.foresight.calibration import calibrate
    from penstock.foresight.plot import draw_plan
    from penstock.weights.locate import default_cache_dir

    goals = planning.parse_slo(options["slo"])
    plot = options["plot"]
    if plot is not None:
        check_suffix(plot)
    pyplot = None if plot is None else plotting()
    question = planning.Question(
        _workload(options["workload"], options["requests"]), goals, options["quantile"], options["requests"]
    )
    measured = calibrate(
        model,
        ("--no-speculate", *serve_options),
        default_cache_dir(os.environ) / "foresight",
        options["calibration_seconds"],
        anew=options["calibrate"],
        announce=lambda line: click.echo(line, err=True),
    )
    machine = planning.Machine(measured.run.config, measured.run.costs, measured.way)
    record = provenance() | {
        "kind": "plan",
        "model": model,
        "serve_options": list(serve_options),
        "workload": options["workload"],
        "goals_ms": {name: bound * 1e3 for name, bound in goals.items()},
        "quantile": options["quantile"],
        "requests": options["requests"],
        "seeds": options["seeds"],
        "calibration": {"steps": measured.run.steps, "seconds": measured.run.seconds, "kept": measured.kept},
    }
    others = planning.variants(machine) if options["compares"] else {}
    record |= _answers(question, machine, others, range(options["seeds"]), options["jobs"] or cpus())
    if pyplot is not None:
        draw_plan(record, plot, pyplot)
    report(_table(record), record, target)


def _workload(named: str, requests: int) -> Workload | Drawn:
    """The workload in a file, or the description of one to draw."""
    from penstock.foresight.planning import drawn
    from penstock.foresight.workloads import read_workload

    path = Path(named)
    if not path.exists():
        return drawn(named)
    workload = read_workload(path, requests)
    if not 0 < workload.rate < float("inf"):
        raise ConfigError("workload", f"{path}: its requests come all at once: there is no rate to change")
    return workload


def _answers(
    question: Question, machine: Machine, others: dict[str, Machine], seeds: Sequence[int], jobs: int
) -> dict[str, Any]:
    """The limit, what clients see around it, and the limits of other machines."""
    from penstock.foresight import planning

    with tqdm(desc="Simulating", total=2 + len(others), leave=False, disable=None) as bar:
        limit = planning.find_limit(question, machine, seeds)
        bar.update()
        rate = limit.rate.value
        rates = [rate * factor for factor in _CURVE] if rate else [_SELDOM]
        curve = [{"rate": each, "latencies_ms": planning.at_rate(question, machine, each, seeds)} for each in rates]
        bar.update()
        found = {}
        for name, other in planning.find_limits(question, others, seeds, rate, jobs):
            found[name] = other
            bar.update()
    return {
        "limit": _plain(limit),
        "curve": curve,
        "others": {name: _plain(each) | {"times": _times(limit, each)} for name, each in found.items()},
    }


def _plain(limit: Limit) -> dict[str, Any]:
    return {
        "rate": list(limit.rate),
        "advised": limit.advised,
        "streams": list(limit.stream),
        "rates": list(limit.rates),
    }


def _times(limit: Limit, other: Limit) -> list[float] | None:
    """`other` over `limit`, seed by seed: median, lowest and highest ratio; None if the limit is 0 with any seed."""
    from penstock.foresight.planning import spread

    if not all(limit.rates):
        return None
    return list(spread([more / less for more, less in zip(other.rates, limit.rates, strict=True)]))


def _table(record: dict[str, Any]) -> str:
    """A plan as text."""
    goals = ", ".join(f"{name} within {bound:g} ms" for name, bound in record["goals_ms"].items())
    limit = record["limit"]
    lines = [f"{record['workload']}: p{record['quantile']:g} of {goals}"]
    if limit["rate"][0]:
        streams = f"{_interval(limit['streams'])} streams at once"
        lines.append(f"this machine holds {_interval(limit['rate'])} requests/s, {streams}")
        lines.append(f"plan for {limit['advised']:.2f} requests/s, which it held on each of {record['seeds']} days")
    else:
        lines.append("this machine does not hold it at any rate; of requests that come one by one clients see")
    names = [(goal, name) for goal in record["goals_ms"] for name in ("p50", f"p{record['quantile']:g}")]
    lines += ["", f"{'requests/s':<12}" + "".join(f"{' '.join(each):>12}" for each in names)]
    for each in record["curve"]:
        values = [each["latencies_ms"][goal].get(name) for goal, name in names]
        shown = "".join(f"{'-' if not of else format(of[0], '.1f'):>12}" for of in values)
        lines.append(f"{each['rate']:<12.2f}{shown}")
    return "\n".join([*lines, *_other_lines(record["others"], limit["rates"])])


def _other_lines(others: dict[str, dict[str, Any]], rates: Sequence[float]) -> list[str]:
    """What other options, more memory and a second machine hold, the most first; `rates` are held without them."""
    if not others:
        return []
    ranked = sorted(others.items(), key=lambda item: -item[1]["rate"][0])
    lines = ["", f"{'with':<42}{'requests/s':>24}{'times the limit':>26}"]
    for name, of in ranked:
        times = _interval(of["times"]) if of["times"] else "-"
        lines.append(f"{name:<42}{_interval(of['rate']):>24}{times:>26}")
    return [*lines, "", _advice(ranked, rates)]


def _advice(ranked: Sequence[tuple[str, dict[str, Any]]], rates: Sequence[float]) -> str:
    """Name the best option that holds more with every seed than the `rates` held without it."""

    def holds_more(of: dict[str, Any]) -> bool:
        return all(more > less * _BETTER for more, less in zip(of["rates"], rates, strict=True))

    better = [name for name, of in ranked if name.startswith("--") and holds_more(of)]
    return (
        f"best option: {better[0]}" if better else "no option alone holds more with every seed: keep the present ones"
    )


def _interval(of: Sequence[float]) -> str:
    value, low, high = of
    return f"{value:.2f} ({low:.2f} to {high:.2f})"
