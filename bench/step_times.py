"""Measures how well the scheduler predicts how long a step takes: the error of `StepTimes`, one step ahead.

    python bench/step_times.py --json bench/results/FILE.json
    python bench/step_times.py MODEL:FORM ... --learn 60 --measure 60 --traces FOLDER
    python bench/step_times.py --trace FOLDER/TRACE ...

A real engine computes a mix of steps in this process and records its trace: 1 to 32 rows that decode at contexts of 64
to 2,000 tokens, prompts of 16 to 512 tokens beside them, and prompts alone. Then a `StepTimes` reads the trace as the
scheduler would: each step is predicted, compared with the measured time, and learned. Steps count once the steps before
them have taken `--learn` seconds. No plan depends on time here, so a trace of an older commit shows what a change of
the model of step times is worth; a trace of `penstock serve --record` is read too.

A MODEL is one that `penstock serve` takes, or `random`, some 200 million random weights; a FORM is a value of
`--quantization`, or `q4_1`: the model as a file that `penstock quantize` writes. By default both models in three forms.

The load does everything twice in a row. `again` is the error of predicting a step from the time of the same plan a
moment before: the noise that even the best model cannot predict. Both are in percent of the measured time, as median,
p90 and p95; `bias` is the median with its sign. Kinds are by rows that decode, and by positions of prompts beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.bench.machine import load_average, provenance
from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.step_time import StepTimes
from penstock.core.trace import Drop, Fail, TraceReader

__all__ = ["Foreseen", "foresee", "kind_of", "main", "measured_steps", "record", "summary"]

RANDOM = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MODELS, FORMS = ("smollm2-135m-instruct", "random"), ("q4_1", "int8", "none")

_STREAMS = (1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SHORTEST, _LONGEST = 64, 2000
"""Tokens of a context."""

_CONTEXTS = 6000
"""The most tokens that all contexts of an episode have together, so that a minute holds many episodes."""

_DECODING = 24
"""Steps of an episode that decode before its streams begin to end."""

_NEWCOMERS = 0.3
"""The chance that a short prompt arrives in a step."""

_CHUNK = 512
_FIRST_WARM = 8
"""How many steps at the beginning are left out: the first steps of a process are slow."""


class Step(NamedTuple):
    """A plan that was computed, and the seconds that it took, without a draft model's and a store's seconds."""

    plan: StepPlan
    seconds: float


class Foreseen(NamedTuple):
    """A step's time as predicted and as measured, in seconds.

    Attributes:
        kind: what the step computes.
        again: the time that the same plan took before; None if it was not computed before.
        before: the time of all steps before this one.
    """

    kind: str
    expected: float
    seconds: float
    again: float | None
    before: float

    @property
    def error(self) -> float:
        """The predicted time less the measured time, as a share of the measured time."""
        return self.expected / self.seconds - 1


def record(model: str, trace: Path, seconds: float, options: dict[str, Any], seed: int = 0) -> list[str]:
    """Compute the load until its steps have taken `seconds`; returns the engine's start report."""
    from penstock import LLM

    settings = {"prefix_caching": False, "speculate": False, "max_num_batched_tokens": _CHUNK, "record": str(trace)}
    with LLM(model, **(settings | options)) as llm, trace.open(encoding="utf-8") as written:
        taken, rng = 0.0, random.Random(seed)
        while taken < seconds:
            episode = rng.random()
            for _ in range(2):
                _run_episode(llm, random.Random(episode))
            taken += sum(json.loads(line)["result"]["seconds"] for line in written if line.startswith('{"result"'))
        return list(llm.report)


def _run_episode(llm: Any, rng: random.Random) -> None:
    """Run streams that begin one after the other, decode with short prompts between, and end one after the other."""
    middle = math.exp(rng.uniform(math.log(_SHORTEST), math.log(_LONGEST)))
    streams = max(1, min(rng.choice(_STREAMS), int(_CONTEXTS / middle)))
    for number in range(streams):
        context = min(_LONGEST, max(_SHORTEST, int(middle * rng.uniform(0.5, 1.5))))
        # Each stream has enough tokens until the last has begun and all have decoded: each chunk of a prompt takes the
        # others a step.
        begins = (streams - number) * (2 + math.ceil(middle * 1.5 / _CHUNK))
        _add(llm, rng, context, begins + _DECODING + rng.randrange(_DECODING))
        for _ in range(rng.randint(1, 3)):
            llm.step()
    for _ in range(_DECODING):
        if rng.random() < _NEWCOMERS:
            _add(llm, rng, int(math.exp(rng.uniform(math.log(16), math.log(_CHUNK)))), rng.randint(1, 4))
        llm.step()
    while llm.has_unfinished_requests():
        llm.step()


def _add(llm: Any, rng: random.Random, prompt: int, tokens: int) -> None:
    from penstock import SamplingParams

    ids = [rng.randrange(10, min(250, llm.card.vocab_size)) for _ in range(prompt)]
    llm.add_request(ids, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))


def measured_steps(lines: Iterable[str]) -> tuple[SchedulerConfig, Iterator[Step]]:
    """The configuration of a trace's scheduler, and the steps that computed something, in order.

    Raises:
        ConfigError: the trace is corrupt or of another version; while iterating too.
    """
    records = TraceReader(lines)
    return records.header().config, _steps(records)


def _steps(records: TraceReader) -> Iterator[Step]:
    in_flight: deque[StepPlan] = deque()
    for _, each, _ in records:
        match each:
            case StepPlan():
                in_flight.append(each)
            case Drop() | Fail():
                in_flight.clear()
            case StepResult():
                plan = in_flight.popleft()
                seconds = each.seconds - each.restoring - (each.guessing.seconds if each.guessing else 0.0)
                if not plan.num_restored and plan.rows and seconds > 0:
                    yield Step(plan, seconds)


def foresee(times: StepTimes, steps: Iterable[Step]) -> Iterator[Foreseen]:
    """Let `times` predict each step, and then learn from it."""
    latest: dict[tuple[tuple[int, int, bool], ...], float] = {}
    before = 0.0
    for number, (plan, seconds) in enumerate(steps):
        shape = tuple(sorted((row.start, row.count, row.sample) for row in plan.rows))
        expected = times.of_plan(plan)
        times.learn(plan, seconds)
        if number >= _FIRST_WARM:
            yield Foreseen(kind_of(plan), expected, seconds, latest.get(shape), before)
        latest[shape] = seconds
        before += seconds


def kind_of(plan: StepPlan) -> str:
    """What a plan computes, in words."""
    rows = [row for row in plan.rows if row.sample and row.count == 1 + len(row.drafts)]
    prompts = plan.num_tokens - sum(row.count for row in rows)
    if not prompts:
        drafts = ", with drafts" if any(row.drafts for row in rows) else ""
        return f"decode {_span(len(rows), (1, 2, 4, 8, 16, 32))}{drafts}"
    if not rows:
        return "prompt alone" if any(row.sample for row in plan.rows) else "prompt alone, not its end"
    return f"prompt of {_span(prompts, (32, 128, 512))} beside"


def _span(number: int, ends: tuple[int, ...]) -> str:
    begin = 1
    for end in ends:
        if number <= end:
            return f"{begin}..{end}" if begin < end else str(end)
        begin = end + 1
    return f"{begin} and more"


def summary(found: Iterable[Foreseen], learn: float) -> dict[str, dict[str, float | int | None]]:
    """Errors by kind and of all steps, in percent, of steps after the first `learn` seconds of computing.

    Nothing is learned from prompts in steps that draw nothing (see `StepTimes.learn`), and `all` leaves them out.
    """
    kinds: dict[str, list[Foreseen]] = defaultdict(list)
    for each in found:
        if each.before >= learn:
            kinds[each.kind].append(each)
            if each.kind != "prompt alone, not its end":
                kinds["all"].append(each)
    return {kind: _errors(kinds[kind]) for kind in sorted(kinds, key=lambda kind: (kind == "all", kind))}


def _errors(steps: list[Foreseen]) -> dict[str, float | int | None]:
    again = sorted(abs(each.again / each.seconds - 1) for each in steps if each.again is not None)
    errors = sorted(abs(each.error) for each in steps)
    row: dict[str, float | int | None] = {"steps": len(steps)}
    row |= {"milliseconds": round(1e3 * statistics.median([each.seconds for each in steps]), 2)}
    row |= {"bias": _percent(statistics.median([each.error for each in steps]))}
    for name, values in (("", errors), ("again_", again)):
        for part, share in (("median", 0.5), ("p90", 0.9), ("p95", 0.95)):
            row[name + part] = _percent(values[int(share * (len(values) - 1))]) if values else None
    return row


def _percent(share: float) -> float:
    return round(100 * share, 2)


def table(rows: dict[str, dict[str, float | int | None]]) -> str:
    """A summary for people."""
    names = ("steps", "milliseconds", "bias", "median", "p90", "p95", "again_median", "again_p90", "again_p95")
    lines = [f"{'':28}" + "".join(f"{name.replace('again_', 'again '):>14}" for name in names)]
    for kind, row in rows.items():
        numbers = ["-" if row[name] is None else f"{row[name]:,}" for name in names]
        lines.append(f"{kind:28}" + "".join(f"{number:>14}" for number in numbers))
    return "\n".join(lines)


def _case(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The model and the options of `MODEL:FORM`; files that it needs are written into `folder`."""
    model, _, form = name.rpartition(":")
    if model == "random":
        from make_random_checkpoint import configure, write_checkpoint

        model = str(folder / "random")
        if not Path(model).exists():
            write_checkpoint(Path(model), configure("llama", RANDOM))
    if form != "q4_1":
        return model, {"quantization": form}
    return _as_q4_1(model, folder), {"quantization": "file"}


def _as_q4_1(model: str, folder: Path) -> str:
    from penstock.cli.quantize import command

    if model == MODELS[0]:
        return model  # is a q4_1 file already
    target = folder / f"{Path(model).name}-q4_1.gguf"
    if not target.exists():
        command.main([model, str(target), "--form", "q4_1"], standalone_mode=False)
    return str(target)


def main() -> None:
    """Record, evaluate, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="MODEL:FORM", help="default: two models in three forms")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="evaluate this one; records nothing")
    parser.add_argument("--learn", type=float, default=60.0, help="seconds of steps before any counts (default: 60)")
    parser.add_argument("--measure", type=float, default=60.0, help="seconds of steps after these (default: 60)")
    parser.add_argument("--threads", type=int, default=0, help="of the engine; as for `penstock serve`")
    parser.add_argument("--traces", type=Path, help="a folder in which traces and models that are made are kept")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    try:
        head = {"kind": "step-times", **provenance(), "learn": options.learn, "measure": options.measure}
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.traces or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            traces = {path.name: path for path in options.trace}
            names = options.cases or [f"{model}:{form}" for model in MODELS for form in FORMS]
            for name in [] if traces else names:
                model, chosen = _case(name, folder)
                path = folder / f"{name.replace('/', '-').replace(':', '-')}.trace"
                found[name] = {
                    "report": record(
                        model, path, options.learn + options.measure, chosen | {"threads": options.threads}
                    )
                }
                found[name] |= _evaluate(name, path, options.learn)
            for name, path in traces.items():
                found[name] = _evaluate(name, path, options.learn)
    except (PenstockError, OSError) as error:
        raise SystemExit(str(error)) from error
    if options.json is not None:
        whole = head | {"cases": found, "load_average_after": load_average()}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _evaluate(name: str, path: Path, learn: float) -> dict[str, Any]:
    with path.open(encoding="utf-8") as lines:
        config, steps = measured_steps(lines)
        try:
            times = StepTimes(config.window, config.step_times)
        except ConfigError:  # recorded by a version whose steps had other parts
            times = StepTimes(config.window)
        rows = summary(foresee(times, steps), learn)
    print(f"{name}\n{table(rows)}\n", flush=True)
    return {"errors": rows}


if __name__ == "__main__":
    main()
