"""`penstock bench`: measurements that anyone can repeat on his own machine."""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from penstock.cli.options import build_configs, config_options
from penstock.contract.config import EngineConfig
from penstock.sampling import SamplingParams
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.offline import LLM

__all__ = ["command"]


@dataclass(frozen=True, slots=True)
class Rates:
    """One measurement: tokens a second, prompts and output apart."""

    prefill: float
    decode: float


@click.command("bench")
@click.option(
    "--streams",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 8, 32),
    show_default=True,
    help=("Requests at once; may be given several times."),
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Length of each prompt.")
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens generated for each.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs; the median is reported.")
@click.option("--json", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write the results here too.")
@config_options(EngineConfig)
@click.pass_context
def command(
    context: click.Context,
    /,
    streams: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    target: Path | None,
    **_: object,
) -> None:
    """Measure offline throughput of MODEL: prefill and decode rates at several numbers of streams."""
    (config,) = build_configs(context, EngineConfig)
    rows = []
    from penstock.llm.offline import LLM  # brings torch in: not for --help

    with LLM(**asdict(config)) as llm:
        for line in llm.report:
            click.echo(line)
        with tqdm(total=len(streams) * (repeats + 1), desc="Measuring", unit="run", leave=False) as bar:
            for count in streams:
                runs = []
                for repeat in range(repeats + 1):
                    rates = measure(llm, count, prompt_tokens, new_tokens, seed=repeat)
                    runs += [rates] if repeat else []  # the first one warms up
                    bar.update()
                rows.append(summary(count, runs))
    click.echo(table(rows))
    if target is not None:
        record = {
            "version": __version__,
            "machine": platform.platform(),
            "python": platform.python_version(),
            "config": asdict(config),
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "rows": rows,
        }
        target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(llm: LLM, streams: int, prompt_tokens: int, new_tokens: int, seed: int) -> Rates:
    """One run: prefill ends when every stream has its first token, decode when every stream has its last."""
    draw = random.Random(f"{seed}/{streams}")  # noqa: S311 - a workload, not a secret
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for _ in range(streams):
        llm.add_request([draw.randrange(llm.card.vocab_size) for _ in range(prompt_tokens)], params)
    tokens: dict[str, int] = {}
    started = time.perf_counter()
    while len(tokens) < streams:
        count_tokens(llm, tokens)
    prefilled, early = time.perf_counter(), sum(tokens.values())
    while llm.has_unfinished_requests():
        count_tokens(llm, tokens)
    ended = time.perf_counter()
    return Rates(
        prefill=streams * prompt_tokens / (prefilled - started),
        decode=(sum(tokens.values()) - early) / (ended - prefilled),
    )


def count_tokens(llm: LLM, tokens: dict[str, int]) -> None:
    """Step once and note how many tokens each request has."""
    for output in llm.step():
        tokens[output.request_id] = len(output.outputs[0].token_ids)


def summary(streams: int, runs: Sequence[Rates]) -> dict[str, Any]:
    """Medians and the spread of the runs."""
    decode = sorted(run.decode for run in runs)
    return {
        "streams": streams,
        "prefill_tok_s": statistics.median(run.prefill for run in runs),
        "decode_tok_s": statistics.median(decode),
        "decode_lowest": decode[0],
        "decode_highest": decode[-1],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results for people."""
    lines = [f"{'streams':>7}  {'prefill tok/s':>13}  {'decode tok/s':>12}  {'lowest..highest':>17}"]
    for row in rows:
        spread = f"{row['decode_lowest']:.1f}..{row['decode_highest']:.1f}"
        lines.append(f"{row['streams']:7}  {row['prefill_tok_s']:13.1f}  {row['decode_tok_s']:12.1f}  {spread:>17}")
    return "\n".join(lines)
