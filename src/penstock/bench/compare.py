"""Penstock and its peers on the same weights, sizes and threads, in turns, with medians, ratios and their spread.

Every contender runs in a process of its own. A round runs each once; the next round begins with another one, so that a
machine that slows down or speeds up meets all alike. A ratio is taken within a round, never between rounds. Where a
peer has alternative flags, a short trial before the first round picks the faster ones.

Knows contenders only as commands that print their runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from penstock.bench.arithmetic import Spread
from penstock.bench.batch import RATES, Run, summary
from penstock.bench.peers import Absent, Contender, Measured, Setting
from penstock.bench.peers import run as run_program
from penstock.contract.errors import EngineFault

__all__ = ["Comparison", "Standing", "compare", "compare_record", "compare_table"]

TRIAL_TOKENS = 32
Execute = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Standing:
    """A contender's measurements: `rounds[r][s]` is its run at the s-th number of streams in round r."""

    name: str
    version: str
    flags: Any
    chosen: tuple[str, ...]
    rounds: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Who was measured, the first being ourselves, and who was not, and why."""

    setting: Setting
    standings: tuple[Standing, ...]
    absent: tuple[Absent, ...]


def compare(
    contenders: Sequence[Contender],
    setting: Setting,
    repeats: int,
    announce: Callable[[str], None],
    execute: Execute = run_program,
) -> Comparison:
    """Measure all contenders in `repeats` rounds.

    A peer that fails is left out from then on and listed with its reason; the first contender must not fail.

    Args:
        contenders: ourselves first.
        setting: what each is run with.
        repeats: rounds.
        announce: called with a line before each run, and its output rates after it.
        execute: runs a command and returns what it printed.

    Raises:
        EngineFault: the first contender failed.
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
            if contender is contenders[0]:
                raise
            failed[contender.name] = str(fault)
            announce(f"{contender.name} failed and is left out: {fault}")

    for contender in contenders:
        with step(contender, "flags"):
            chosen[contender.name] = choose_flags(contender, setting, execute)
    for number in range(repeats):
        for contender in in_turn([each for each in contenders if each.name not in failed], number):
            with step(contender, f"round {number + 1} of {repeats}"):
                measured = measure(contender, setting, chosen[contender.name], execute)
                results[contender.name].append(measured)
                announce("  " + ", ".join(f"{run.output_tok_s:.1f} at {run.load.streams}" for run in measured.runs))
    standings = tuple(
        _standing(each.name, chosen[each.name], results[each.name]) for each in contenders if each.name not in failed
    )
    return Comparison(setting, standings, tuple(Absent(name, reason) for name, reason in failed.items()))


def in_turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: each begins one further on."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def choose_flags(contender: Contender, setting: Setting, execute: Execute) -> tuple[str, ...]:
    """The alternative with the highest geometric mean of output rates over the numbers of streams."""
    if len(contender.alternatives) == 1:
        return contender.alternatives[0]
    trial = replace(setting, new_tokens=min(setting.new_tokens, TRIAL_TOKENS))

    def speed(flags: tuple[str, ...]) -> float:
        return prod(each.output_tok_s for each in measure(contender, trial, flags, execute).runs)

    return max(contender.alternatives, key=speed)


def measure(contender: Contender, setting: Setting, flags: Sequence[str], execute: Execute) -> Measured:
    """One process of a contender.

    Raises:
        EngineFault: it failed, or did not print the runs that it was asked for.
    """
    printed = execute(contender.command(setting, flags))
    try:
        measured = contender.read(printed)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineFault(f"printed no result that can be read: {printed[-300:].strip()!r}") from error
    if [each.load for each in measured.runs] != setting.loads():
        raise EngineFault("measured other loads than it was asked for")
    return measured


def _standing(name: str, chosen: tuple[str, ...], measured: Sequence[Measured]) -> Standing:
    return Standing(name, measured[0].version, measured[0].flags, chosen, tuple(each.runs for each in measured))


def ratios(ours: Standing, theirs: Standing, stream_index: int, rate: str) -> Spread:
    """Our rate over theirs, round by round."""
    pairs = zip(ours.rounds, theirs.rounds, strict=True)
    return Spread.of([getattr(a[stream_index], rate) / getattr(b[stream_index], rate) for a, b in pairs])


def compare_record(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON: every contender's rows, and the ratios of ours to theirs."""
    setting = comparison.setting
    ours = comparison.standings[0]
    return {
        "model": setting.model.name,
        "model_bytes": setting.model.stat().st_size if setting.model.is_file() else None,
        "threads": setting.threads,
        "prompt_tokens": setting.prompt_tokens,
        "new_tokens": setting.new_tokens,
        "streams": list(setting.streams),
        "repeats": len(ours.rounds),
        "contenders": [_contender_record(ours, each) for each in comparison.standings],
        "absent": {each.name: each.reason for each in comparison.absent},
    }


def _contender_record(ours: Standing, standing: Standing) -> dict[str, Any]:
    rows = []
    for index in range(len(standing.rounds[0])):
        row = summary([runs[index] for runs in standing.rounds])
        for rate in RATES:
            ratio = ratios(ours, standing, index, rate)
            row[f"ours_over_theirs_{rate.removesuffix('_tok_s')}"] = [ratio.median, ratio.lowest, ratio.highest]
        rows.append(row)
    return {
        "name": standing.name,
        "version": standing.version,
        "flags": standing.flags,
        "chosen_flags": list(standing.chosen),
        "rows": rows,
    }


def compare_table(record: dict[str, Any]) -> str:
    """The record for people: a group for each number of streams, the fastest in output tokens first."""
    width = max(len(each["name"]) for each in record["contenders"])
    heads = f"{'streams':>7}  {'engine':<{width}}  {'prefill tok/s':>13}  {'decode tok/s':>12}  {'output tok/s':>12}"
    lines = [f"{heads}  ours / theirs in output (lowest..highest)"]
    rows = [
        (row["streams"], -row["output_tok_s"], each["name"], row)
        for each in record["contenders"]
        for row in each["rows"]
    ]
    for streams, group in groupby(sorted(rows, key=lambda each: each[:3]), key=lambda each: each[0]):
        for _, _, name, row in group:
            median, lowest, highest = row["ours_over_theirs_output"]
            rates = f"{row['prefill_tok_s']:13.1f}  {row['decode_tok_s']:12.1f}  {row['output_tok_s']:12.1f}"
            lines.append(f"{streams:7}  {name:<{width}}  {rates}  {median:.2f} ({lowest:.2f}..{highest:.2f})")
    lines += [f"{name}: {reason}" for name, reason in record["absent"].items()]
    return "\n".join(lines)
