"""Penstock and its peers on the same weights, sizes and threads, in turns, with medians, ratios and their spread.

Every contender runs in a process of its own. A round runs each once, and each round begins with another contender, so
that a machine that slows down or speeds up affects all alike. Ratios are taken within a round, never between rounds.
Several contenders may be ours, one per variant (see `penstock.bench.variants`): each has its own ratio to every other
contender, and the best of ours is compared with the best of the peers.

If a contender has alternative flags, short trials in turns before the first round pick the fastest. A contender gets
one choice for all numbers of streams and for both phases, because that is how people run a server, even if other flags
would be quicker at one of them.

Knows contenders only as commands that print their runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from statistics import geometric_mean, median
from typing import Any, TypeVar

from peers.contenders import Absent, Contender, Measured, Setting
from peers.process import run as run_program
from penstock.bench.arithmetic import Spread
from penstock.bench.batch import RATES, Run, summary
from penstock.bench.limits import Limits, share_text, shares
from penstock.contract.errors import EngineFault
from penstock.contract.model import StepCost

__all__ = ["TRIALS", "Comparison", "Standing", "compare", "compare_record", "compare_table"]

TRIAL_TOKENS = 32
TRIALS = 3
Execute = Callable[[Sequence[str]], str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """Holds a contender's measurements: `rounds[r][s]` is its run at the s-th number of streams in round r."""

    name: str
    ours: bool
    version: str
    flags: Any
    chosen: tuple[str, ...]
    rounds: tuple[tuple[Run, ...], ...]
    costs: tuple[dict[str, StepCost], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds the contenders that were measured, ours first, and those that were not, with the reasons."""

    setting: Setting
    standings: tuple[Standing, ...]
    absent: tuple[Absent, ...]


def compare(
    contenders: Sequence[Contender],
    setting: Setting,
    repeats: int,
    announce: Callable[[str], None],
    execute: Execute = run_program,
    trials: int = TRIALS,
) -> Comparison:
    """Measure all contenders in `repeats` rounds.

    A peer that fails is left out from then on and listed with its reason; a contender of ours must not fail.

    Args:
        contenders: ours first.
        setting: what each contender is run with.
        repeats: the number of rounds.
        announce: called with a line before each trial and run, and with its output rates after it.
        execute: runs a command and returns what it printed.
        trials: the number of rounds of trials between alternative flags.

    Raises:
        EngineFault: a contender of ours failed.
    """
    failed: dict[str, str] = {}
    chosen: dict[str, tuple[str, ...]] = {}
    results: dict[str, list[Measured]] = {each.name: [] for each in contenders}

    @contextmanager
    def step(contender: Contender, purpose: str) -> Iterator[None]:
        announce(f"{purpose}: {contender.name}")
        try:
            yield
        except EngineFault as fault:
            if contender.ours:
                raise
            failed[contender.name] = str(fault)
            announce(f"{contender.name} failed and is left out: {fault}")

    for contender in contenders:
        with step(contender, "flags"):
            chosen[contender.name] = choose_flags(contender, setting, announce, execute, trials)
    for number in range(repeats):
        for contender in in_turn([each for each in contenders if each.name not in failed], number):
            with step(contender, f"round {number + 1} of {repeats}"):
                measured = measure(contender, setting, chosen[contender.name], execute)
                results[contender.name].append(measured)
                announce("  " + ", ".join(f"{run.output_tok_s:.1f} at {run.load.streams}" for run in measured.runs))
    standings = tuple(
        _standing(each, chosen[each.name], results[each.name]) for each in contenders if each.name not in failed
    )
    return Comparison(setting, standings, tuple(Absent(name, reason) for name, reason in failed.items()))


def in_turn(contenders: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: each round begins one contender further on."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def choose_flags(
    contender: Contender, setting: Setting, announce: Callable[[str], None], execute: Execute, trials: int = TRIALS
) -> tuple[str, ...]:
    """Choose the fastest flags by short trials in turns, or earlier flags that they do not beat in every round.

    A trial's speed is the geometric mean of its output rates over the numbers of streams; the fastest flags have the
    highest median over all rounds. Flags that do not lose every round to the fastest are as fast, as far as trials can
    tell: the earliest of them are chosen, because the default comes first. Flags that make a peer fail are dropped.

    Raises:
        EngineFault: the contender failed with all flags, or failed and is ours.
    """
    if len(contender.alternatives) == 1:
        return contender.alternatives[0]
    trial = replace(setting, new_tokens=min(setting.new_tokens, TRIAL_TOKENS))
    speeds: dict[tuple[str, ...], list[float]] = {flags: [] for flags in contender.alternatives}
    for number in range(trials):
        for flags in in_turn(contender.alternatives, number):
            if flags not in speeds:
                continue
            announce(f"  trial {number + 1} of {trials}: {_flags_text(flags)}")
            try:
                runs = measure(contender, trial, flags, execute).runs
            except EngineFault as fault:
                del speeds[flags]
                if contender.ours or not speeds:
                    raise
                announce(f"  fails with {_flags_text(flags)}: {fault}")
                continue
            speeds[flags].append(geometric_mean(each.output_tok_s for each in runs))
    chosen = _fastest(speeds)
    medians = ", ".join(f"{median(found):.1f} with {_flags_text(flags)}" for flags, found in speeds.items())
    announce(f"  takes {_flags_text(chosen)}: {medians}")
    return chosen


def _fastest(speeds: Mapping[tuple[str, ...], Sequence[float]]) -> tuple[str, ...]:
    """Return the first flags that the flags with the highest median do not beat in every round."""
    highest = max(speeds.values(), key=median)
    return next(flags for flags, found in speeds.items() if not all(a > b for a, b in zip(highest, found, strict=True)))


def _flags_text(flags: Sequence[str]) -> str:
    return " ".join(flags) or "the defaults"


def measure(contender: Contender, setting: Setting, flags: Sequence[str], execute: Execute) -> Measured:
    """Run one process of a contender.

    Raises:
        EngineFault: the process failed, or did not print the runs that it was asked for.
    """
    printed = execute(contender.command(setting, flags))
    try:
        measured = contender.read(printed)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineFault(f"printed no result that can be read: {printed[-300:].strip()!r}") from error
    if [each.load for each in measured.runs] != setting.loads():
        raise EngineFault("measured other loads than it was asked for")
    return measured


def _standing(contender: Contender, chosen: tuple[str, ...], measured: Sequence[Measured]) -> Standing:
    first, rounds = measured[0], tuple(each.runs for each in measured)
    return Standing(contender.name, contender.ours, first.version, first.flags, chosen, rounds, first.costs)


def ratios(ours: Standing, theirs: Standing, stream_index: int, rate: str) -> Spread:
    """Divide our rate by theirs, round by round."""
    pairs = zip(ours.rounds, theirs.rounds, strict=True)
    return Spread.of([getattr(a[stream_index], rate) / getattr(b[stream_index], rate) for a, b in pairs])


def compare_record(comparison: Comparison, limits: Limits | None = None) -> dict[str, Any]:
    """Return the comparison as JSON: every contender's rows, the ratio of each of ours to it, and best against best.

    Args:
        comparison: holds at least one contender of ours.
        limits: the machine's limits; with them our rows say what share of the limit they reached.
    """
    setting, standings = comparison.setting, comparison.standings
    ours = [each for each in standings if each.ours]
    return {
        "model": setting.model.name,
        "model_bytes": setting.model.stat().st_size if setting.model.is_file() else None,
        "threads": setting.threads,
        "prompt_tokens": setting.prompt_tokens,
        "new_tokens": setting.new_tokens,
        "streams": list(setting.streams),
        "repeats": len(ours[0].rounds),
        "limits": None if limits is None else asdict(limits),
        "contenders": [_contender_record(ours, each, limits) for each in standings],
        "best": best_against_best(standings, setting.streams),
        "absent": {each.name: each.reason for each in comparison.absent},
    }


def _contender_record(ours: Sequence[Standing], standing: Standing, limits: Limits | None) -> dict[str, Any]:
    rows = []
    for index in range(len(standing.rounds[0])):
        row = summary([runs[index] for runs in standing.rounds])
        if standing.costs and limits is not None:
            row |= shares(row, standing.costs[index], limits)
        row["ours_over_theirs"] = {
            each.name: {rate.removesuffix("_tok_s"): _triple(ratios(each, standing, index, rate)) for rate in RATES}
            for each in ours
        }
        rows.append(row)
    return {
        "name": standing.name,
        "ours": standing.ours,
        "version": standing.version,
        "flags": standing.flags,
        "chosen_flags": list(standing.chosen),
        "rows": rows,
    }


def _triple(spread: Spread) -> list[float]:
    return [spread.median, spread.lowest, spread.highest]


def best_against_best(standings: Sequence[Standing], streams: Sequence[int]) -> list[dict[str, Any]]:
    """Find, for each number of streams and each rate, our fastest and the fastest peer by median, and their ratio."""
    ours, peers = ([each for each in standings if each.ours is own] for own in (True, False))
    if not peers:
        return []
    found = []
    for index, count in enumerate(streams):
        for rate in RATES:

            def typical(standing: Standing, index: int = index, rate: str = rate) -> float:
                return Spread.of([getattr(runs[index], rate) for runs in standing.rounds]).median

            own, peer = max(ours, key=typical), max(peers, key=typical)
            ratio = _triple(ratios(own, peer, index, rate))
            found.append(
                {"streams": count, "rate": rate.removesuffix("_tok_s"), "ours": own.name, "peer": peer.name}
                | {"ours_over_theirs": ratio}
            )
    return found


def compare_table(record: dict[str, Any]) -> str:
    """Show the record as a table: for each number of streams by output rate, fastest first; then best against best.

    Ratios are those of our first contender.
    """
    baseline = next(each["name"] for each in record["contenders"] if each["ours"])
    width = max(len(each["name"]) for each in record["contenders"])
    heads = f"{'streams':>7}  {'engine':<{width}}  {'prefill tok/s':>13}  {'decode tok/s':>12}  {'output tok/s':>12}"
    lines = [f"{heads}  {baseline} / it: prefill, decode (lowest..highest)"]
    rows = [
        (row["streams"], -row["output_tok_s"], each["name"], row)
        for each in record["contenders"]
        for row in each["rows"]
    ]
    for streams, group in groupby(sorted(rows, key=lambda each: each[:3]), key=lambda each: each[0]):
        for _, _, name, row in group:
            rates = f"{row['prefill_tok_s']:13.1f}  {row['decode_tok_s']:12.1f}  {row['output_tok_s']:12.1f}"
            ratio = row["ours_over_theirs"][baseline]
            lines.append(
                f"{streams:7}  {name:<{width}}  {rates}  {_ratio(ratio['prefill'])}, {_ratio(ratio['decode'])}"
                + share_text(row)
            )
    for best in record["best"]:
        if best["rate"] in ("prefill", "decode"):
            names = f"{best['ours']} / {best['peer']}"
            lines.append(f"{best['streams']:7}  best {best['rate']}: {names} {_ratio(best['ours_over_theirs'])}")
    lines += [f"{name}: {reason}" for name, reason in record["absent"].items()]
    return "\n".join(lines)


def _ratio(triple: Sequence[float]) -> str:
    median, lowest, highest = triple
    return f"{median:.2f} ({lowest:.2f}..{highest:.2f})"
