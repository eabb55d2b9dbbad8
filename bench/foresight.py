"""Measures a server and simulates the same days: how far predicted latencies are from what clients measured.

    python bench/foresight.py days --json bench/results/FILE.json
    python bench/foresight.py limit --slo ttft=1s,itl=100ms --json bench/results/FILE.json -- --step-target-ms 50

`days`: for each of three workloads, a separate server (`penstock serve --record`) first gets requests of the workload,
from 1 to 32 at once, for `--learn` seconds or a little longer. They provide all that the simulation knows about steps
and about the way between client and engine, and the workload's capacity in requests a second. Then requests arrive at
random for `--seconds`, at a share of that capacity: conversations and long prompts at 0.7, prompts that share prefixes
at 1.2. The simulation is given the times at which the engine received these requests, their lengths and what they
share. Its result is compared with what the clients measured, by median and p99 of the time to the first token, between
tokens, and to the end. A third column is simulated with all steps of the record, the test's too, and the machine's pace
in each second. It shows how much of an error comes from a change of the machine's pace between learning and test.
(Steps of the test alone would not do: the requests that taught are simulated too, and would leave a queue.) With
`--records FOLDER` what was measured is kept; days that are there are simulated again and not measured again.

`limit`: `penstock plan` advises a rate that keeps the goals, for a day of conversations that is the same in all its
simulations. A server gets exactly that day at this rate and at 1.2 times this rate, in turns and with other tokens each
time, so that a change of the machine's pace affects both. A rate is held if the median of its turns is within each
goal. Options of the server follow `--`.

Speculation is off (`--no-speculate`), because random prompts have no continuation that could be guessed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from penstock.bench.arithmetic import percentile
from penstock.bench.latency import Latency
from penstock.bench.machine import load_average, provenance
from penstock.bench.serving import Outcome
from penstock.bench.workload import Call
from penstock.cli import run as run_command
from penstock.foresight.arrivals import Arrival
from penstock.foresight.calibration import Driven, Way, calibrate, drive_recorded, recorded_server, way_of
from penstock.foresight.engine import SimulatedEngine, run, simulated_config
from penstock.foresight.files import read_lines
from penstock.foresight.planning import Goals, Machine, Question, find_limit, parse_slo
from penstock.foresight.recorded import RecordedRun, read_record
from penstock.foresight.workloads import DRAWN, Drawn

__all__ = ["command"]

DAYS = {"chat": 0.7, "long": 0.7, "shared": 1.2}
"""Workloads, and the share of the capacity at which their requests arrive."""

_OPTIONS = ("--no-speculate",)
_STREAMS = (1, 2, 4, 8, 16, 32)
_SEEDS = 3
_LIMIT_SEEDS = 5
"""How often the day of a limit is simulated; each simulation draws other step durations."""

_FACTORS = (1.0, 1.2)
"""Multiples of the advised rate that are tried."""

_QUANTILES = (50, 99)
_VOCAB = 10_000
_PREFIXES = 1 << 40


def calls_of(drawn: Drawn, rate: float, count: int, seed: int) -> list[Call]:
    """The calls of a workload that is drawn with this seed; the seed also chooses the tokens."""
    return _calls(drawn.draw("", rate, count, seed).arrivals(1 << 20), seed)


def _calls(arrivals: Iterable[Arrival], seed: int) -> list[Call]:
    """Turn made-up tokens into ids below `_VOCAB`: equal tokens into equal ids, and into others with another seed."""
    calls = []
    for number, arrival in enumerate(arrivals):
        shared = [token for token in arrival.request.prompt if token < _PREFIXES]
        own = len(arrival.request.prompt) - len(shared)
        prompt = [token * 7919 % _VOCAB for token in shared]
        prompt += [(seed * 104_729 + number * 1009 + place * place * 31 + place) % _VOCAB for place in range(own)]
        calls.append(Call(arrival.at, tuple(prompt), arrival.request.stop.max_tokens))
    return calls


class Day(NamedTuple):
    """What the clients of one server measured.

    Attributes:
        taught: the load tests before the day.
        test: the day.
        capacity, rate: requests a second: as measured before the day, and as they arrived.
    """

    taught: list[Driven]
    test: Driven
    capacity: float
    rate: float


def measure_day(model: str, name: str, learn: float, seconds: float, folder: Path) -> dict[str, Any]:
    """Measure one workload, or read what is in the folder, and simulate it with what was learned before it."""
    record, clients = folder / f"{name}.jsonl", folder / f"{name}-clients.json"
    if not clients.exists():
        record.unlink(missing_ok=True)
        clients.write_bytes(msgspec.json.encode(_measure(model, name, learn, seconds, record)))
    taught, test, capacity, rate = msgspec.json.decode(clients.read_bytes(), type=Day)
    learned_for = taught[-1].began + max(each.ended for each in taught[-1].outcomes) - taught[0].began
    run_before = read_record(read_lines(record), until=learned_for)
    run_whole = read_record(read_lines(record))
    way = way_of(run_before, _together(taught))
    measured = _measured(test.outcomes)
    predicted = _simulate(run_before, way, test)
    known = _simulate(run_whole, way, test, part=0.0)
    return {
        "workload": name,
        "capacity_requests_s": capacity,
        "rate": rate,
        "requests": len(test.calls),
        "failed": sum(bool(each.error) for each in test.outcomes),
        "learned_seconds": learned_for,
        "way_ms": {"there": way.there * 1e3, "back": way.back * 1e3, "end": way.end * 1e3},
        "latencies_ms": _beside(measured, predicted, known),
    }


def _measure(model: str, name: str, learn: float, seconds: float, record: Path) -> Day:
    with recorded_server(model, _OPTIONS, record) as url:
        taught = asyncio.run(_teach(url, DRAWN[name], learn))
        capacity = _capacity(taught[-1])
        rate = capacity * DAYS[name]
        test = asyncio.run(drive_recorded(url, calls_of(DRAWN[name], rate, max(20, round(rate * seconds)), seed=1)))
    return Day(taught, test, capacity, rate)


async def _teach(url: str, drawn: Drawn, seconds: float) -> list[Driven]:
    """Send from 1 to 32 requests at once, for an equal time with each number; the last tests are with 32."""
    tests: list[Driven] = []
    began = time.monotonic()
    for place, streams in enumerate(_STREAMS, start=1):
        while not tests or time.monotonic() < began + seconds * place / len(_STREAMS):
            calls = calls_of(drawn, 1.0, 3 * streams, seed=100 + len(tests))
            tests.append(await drive_recorded(url, _at_once(calls), streams))
    while len(tests[-1].calls) < 3 * _STREAMS[-1]:
        calls = calls_of(drawn, 1.0, 3 * _STREAMS[-1], seed=100 + len(tests))
        tests.append(await drive_recorded(url, _at_once(calls), _STREAMS[-1]))
    return tests


def _capacity(test: Driven) -> float:
    """Requests a second while all streams are taken, from the middle half of the requests that ended."""
    ended = sorted(outcome.ended for outcome in test.outcomes)
    first, last = len(ended) // 4, 3 * len(ended) // 4
    return (last - first) / (ended[last] - ended[first])


def _at_once(calls: Sequence[Call]) -> list[Call]:
    return [replace(call, offset=0.0) for call in calls]


def _together(bursts: Sequence[Driven]) -> Driven:
    """Join load tests that ran one after the other into one."""
    first = bursts[0].began
    calls = [call for each in bursts for call in each.calls]
    outcomes = []
    for each in bursts:
        late = each.began - first
        for outcome in each.outcomes:
            content = tuple(moment + late for moment in outcome.content)
            outcomes.append(
                replace(
                    outcome,
                    due=outcome.due + late,
                    sent=outcome.sent + late,
                    ended=outcome.ended + late,
                    content=content,
                )
            )
    return Driven(first, calls, outcomes)


def _simulate(taught: RecordedRun, way: Way, test: Driven, part: float | None = None) -> dict[str, list[float]]:
    """Predict what the clients of the test see, in milliseconds, over all seeds; `part` as for `CostDraws`."""
    prompts = {call.prompt for call in test.calls}
    wanted = {each.request.id for each in taught.arrivals if each.request.prompt in prompts}
    config = simulated_config(taught.config)
    found: dict[str, list[float]] = {"ttft": [], "itl": [], "e2e": []}
    for seed in range(_SEEDS):
        for served in run(SimulatedEngine(config, taught.costs, seed, part), taught.arrivals):
            if served.id in wanted:
                found["ttft"].append((served.first_token + way.there + way.back) * 1e3)
                found["itl"] += [gap * 1e3 for gap in served.gaps]
                found["e2e"].append((served.end_to_end + way.there + way.end) * 1e3)
    return found


def _measured(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    latencies = [Latency.of(outcome) for outcome in outcomes if not outcome.error]
    return {
        "ttft": [each.ttft for each in latencies],
        "itl": [gap for each in latencies for gap in each.itl],
        "e2e": [each.e2e for each in latencies],
    }


def _beside(
    measured: dict[str, list[float]], predicted: dict[str, list[float]], known: dict[str, list[float]]
) -> dict[str, Any]:
    """All three sets of latencies, and the errors as shares of what was measured."""
    table: dict[str, Any] = {}
    for latency, samples in measured.items():
        for quantile in _QUANTILES:
            fact, said, best = (percentile(each, quantile) for each in (samples, predicted[latency], known[latency]))
            table[f"{latency} p{quantile}"] = {
                "measured": fact,
                "simulated": said,
                "error": said / fact - 1,
                "with_its_steps": best,
                "error_with_its_steps": best / fact - 1,
            }
    return table


def day_table(day: dict[str, Any]) -> str:
    """A day as a table for people."""
    lines = [f"\n{day['workload']}: {day['requests']} requests, {day['rate']:.2f} a second, {day['failed']} failed"]
    lines.append(
        f"{'milliseconds':<14}{'measured':>12}{'simulated':>12}{'error':>10}{'with its steps':>18}{'error':>10}"
    )
    for name, each in day["latencies_ms"].items():
        row = f"{name:<14}{each['measured']:>12.1f}{each['simulated']:>12.1f}{each['error']:>+10.1%}"
        lines.append(f"{row}{each['with_its_steps']:>18.1f}{each['error_with_its_steps']:>+10.1%}")
    return "\n".join(lines)


def measure_limit(
    model: str, serve_options: Sequence[str], slo: str, quantile: float, requests: int, seconds: float, turns: int
) -> dict[str, Any]:
    """The rate that `penstock plan` advises for a day of conversations, and a server at that rate and 1.2 times it."""
    goals = parse_slo(slo)
    options = (*_OPTIONS, *serve_options)
    day = DRAWN["chat"].draw("chat", 1.0, requests, seed=1)
    with tempfile.TemporaryDirectory() as kept:
        measured = calibrate(model, options, Path(kept), seconds, anew=True, announce=click.echo)
    machine = Machine(measured.run.config, measured.run.costs, measured.way)
    question = Question(day, goals, quantile, requests)
    limit = find_limit(question, machine, range(_LIMIT_SEEDS))
    click.echo(f"advised {limit.advised:.2f} requests/s, of {limit.rate.low:.2f} to {limit.rate.high:.2f}")
    found: dict[str, Any] = {
        "goals": goals,
        "quantile": quantile,
        "rate": list(limit.rate),
        "advised": limit.advised,
        "streams": list(limit.stream),
    }
    if not limit.advised:
        return found | {"tried": []}
    runs: dict[float, list[dict[str, float]]] = {factor: [] for factor in _FACTORS}
    with tempfile.TemporaryDirectory() as made, recorded_server(model, options, Path(made) / "record.jsonl") as url:
        for seed, (turn, factor) in enumerate(product(range(turns), _FACTORS)):
            arrivals = question.arrivals(machine, limit.advised * factor, 0)
            driven = asyncio.run(drive_recorded(url, _calls(arrivals, seed)))
            seen = _measured(driven.outcomes)
            failed = sum(bool(each.error) for each in driven.outcomes)
            reached = {f"{goal}_ms": percentile(seen[goal], quantile) for goal in goals}
            runs[factor].append(reached | {"failed": failed})
            click.echo(f"turn {turn + 1} of {turns}, {factor:g} times the limit: {runs[factor][-1]}")
    return found | {"tried": [_judged(factor, limit.advised * factor, runs[factor], goals) for factor in _FACTORS]}


def _judged(factor: float, rate: float, runs: Sequence[dict[str, float]], goals: Goals) -> dict[str, Any]:
    """A rate's turns, and whether their median keeps the goals."""
    median = {goal: statistics.median(run[f"{goal}_ms"] for run in runs) for goal in goals}
    held = all(median[goal] <= bound * 1e3 for goal, bound in goals.items()) and not any(run["failed"] for run in runs)
    return {"factor": factor, "rate": rate, "median_ms": median, "held": held, "turns": list(runs)}


def limit_table(record: dict[str, Any]) -> str:
    """What was advised and what came of it, for people."""
    rate, low, high = record["rate"]
    lines = [f"\nlimit {rate:.2f} requests/s ({low:.2f} to {high:.2f}), advised {record['advised']:.2f}"]
    for each in record["tried"]:
        reached = ", ".join(f"{goal} {value:.0f} ms" for goal, value in each["median_ms"].items())
        word = "held" if each["held"] else "missed"
        lines.append(f"{each['factor']:g} times it, {each['rate']:.2f} requests/s: {word} (medians: {reached})")
    return "\n".join(lines)


@click.command()
@click.argument("what", type=click.Choice(["days", "limit"]))
@click.argument("serve_options", nargs=-1, metavar="[-- SERVE OPTIONS]")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--workload", multiple=True, type=click.Choice(list(DAYS)), help="Only this; may be given several times.")
@click.option("--learn", default=25.0, show_default=True, help="Seconds before each day, from which is learned.")
@click.option("--seconds", default=75.0, show_default=True, help="In which requests come; for limit, of calibration.")
@click.option("--slo", default="ttft=1s,itl=100ms", show_default=True)
@click.option("--quantile", default=99.0, show_default=True)
@click.option("--requests", default=300, show_default=True, help="Of the day of limit.")
@click.option("--turns", default=3, show_default=True, help="How often limit sends its day at each rate.")
@click.option("--records", type=click.Path(path_type=Path, file_okay=False), help="Keep what days measured here.")
@click.option("--json", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write a record here.")
def command(
    what: str, model: str, serve_options: tuple[str, ...], records: Path | None, target: Path | None, **options: Any
) -> None:
    """Predicted latencies beside measured ones; see the head of this file."""
    if what == "days" and serve_options:
        raise click.UsageError("options of the server are for limit")
    record: dict[str, Any] = provenance() | {"kind": f"foresight-{what}", "model": model, "options": options}
    if what == "days":
        record["days"] = []
        with tempfile.TemporaryDirectory() as made:
            folder = records or Path(made)
            folder.mkdir(parents=True, exist_ok=True)
            for name in options["workload"] or DAYS:
                day = measure_day(model, name, options["learn"], options["seconds"], folder)
                click.echo(day_table(day))
                record["days"].append(day)
    else:
        asked = (options[name] for name in ("slo", "quantile", "requests", "seconds", "turns"))
        record |= {"serve_options": list(serve_options)} | measure_limit(model, serve_options, *asked)
        click.echo(limit_table(record))
    record["load_average_after"] = load_average()
    if target is not None:
        target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(command, "python bench/foresight.py")
