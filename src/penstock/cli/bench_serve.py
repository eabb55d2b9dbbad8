"""`penstock bench serve`: a load test of any server that speaks OpenAI's streaming API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from penstock.bench import latency, serving, workload
from penstock.bench.event_stream import Target
from penstock.bench.machine import load_average, provenance
from penstock.cli.bench_report import json_option, report
from penstock.contract.config import DEFAULT_MODEL
from penstock.contract.errors import ConfigError, EngineFault

__all__ = ["command"]


@click.command("serve")
@click.option(
    "--base-url",
    default="http://127.0.0.1:8000/v1",
    show_default=True,
    help="Base URL of the server to measure, including /v1. No server is started.",
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Name of the model on that server.")
@click.option(
    "--endpoint",
    type=click.Choice(list(serving.ENDPOINTS)),
    default="completions",
    show_default=True,
    help="completions sends token ids, so that lengths are exact; chat sends a message with as many letters.",
)
@click.option("--num-prompts", type=click.IntRange(1), default=64, show_default=True, help="Number of requests.")
@click.option("--rate", type=float, default=0.0, help="Requests sent per second; without it, all are sent at once.")
@click.option("--poisson", is_flag=True, help="Send at random times with mean --rate, instead of equal intervals.")
@click.option("--concurrency", type=click.IntRange(0), default=0, help="Most requests in flight at once; 0: no limit.")
@click.option("--prompt-tokens", default="128", show_default=True, help="Tokens per prompt, or a range such as 64:256.")
@click.option("--new-tokens", default="128", show_default=True, help="Tokens asked for per request, or a range.")
@click.option(
    "--shared-prefix-tokens", type=click.IntRange(0), default=0, help="Tokens that prompts share, before their own."
)
@click.option(
    "--shared-prefixes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of different shared prefixes; each prompt begins with one of them.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help='File of JSON lines with "offset" (s), "prompt_tokens", "output_tokens": replaces numbers, rate and lengths.'
    " Qwen-Bailian traces work too, with the prefixes that their prompts share.",
)
@click.option(
    "--trace-speed",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Send the trace this many times as fast as it was recorded.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(1),
    default=10000,
    show_default=True,
    help="Draw random prompts from token ids below this.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of arrival times, lengths and contents.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for exactly --new-tokens; servers that do not know ignore_eos may refuse.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Requests sent before the measurement and not counted.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds after which a request counts as failed.",
)
@click.option("--api-key", default="", help="Bearer token for that server.")
@click.option(
    "--goodput",
    metavar="GOAL [GOAL...]",
    help="Count the requests within these bounds, in ms: --goodput ttft:200 tpot:50 e2e:5000.",
)
@click.argument("more_goals", nargs=-1, metavar="")
@json_option
@click.pass_context
def command(context: click.Context, /, target: Path | None, **options: Any) -> None:
    """Measure a running server under load, through OpenAI's streaming API: latencies, throughput, goodput."""
    goals = _goals(options["goodput"], options["more_goals"])
    calls = _calls(context, options)
    request_options = _request_options(options)
    head = provenance()
    outcomes = asyncio.run(_drive(calls, request_options, options["warm_up"], options["concurrency"]))
    summary = latency.serve_summary(outcomes, goals)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    del shown["api_key"], shown["goodput"], shown["more_goals"]
    record = head | {"kind": "serve", "options": shown, "summary": summary}
    record |= {"load_average_after": load_average(), "requests": [latency.request_record(each) for each in outcomes]}
    report(latency.latency_table(summary), record, target)
    if not summary["completed"]:
        raise EngineFault("no request was answered")


def _goals(first: str | None, more: tuple[str, ...]) -> dict[str, float]:
    if first is None and more:
        raise ConfigError("goodput", f"{' '.join(more)!r} belongs to no option; bounds follow --goodput")
    return latency.parse_goals([] if first is None else [first, *more])


def _calls(context: click.Context, options: dict[str, Any]) -> list[workload.Call]:
    """The workload that the options describe."""
    shared, prefixes = options["shared_prefix_tokens"], options["shared_prefixes"]
    vocab_size, seed = options["vocab_size"], options["seed"]
    if prefixes > 1 and not shared:
        raise ConfigError("shared_prefixes", "needs --shared-prefix-tokens, their length")
    if options["trace"] is not None:
        for name in ("num_prompts", "rate", "poisson", "prompt_tokens", "new_tokens"):
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise ConfigError(name, "has no meaning with --trace, which says when and how long")
        return workload.read_trace(options["trace"], shared, vocab_size, seed, prefixes, options["trace_speed"])
    if options["trace_speed"] != 1.0:
        raise ConfigError("trace_speed", "has no meaning without --trace")
    prompts = workload.Lengths.parse("prompt_tokens", options["prompt_tokens"])
    outputs = workload.Lengths.parse("new_tokens", options["new_tokens"])
    arrivals = workload.Arrivals(options["rate"], options["poisson"])
    return workload.make_calls(options["num_prompts"], arrivals, prompts, outputs, shared, vocab_size, seed, prefixes)


def _request_options(options: dict[str, Any]) -> serving.RequestOptions:
    key = options["api_key"]
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key", "holds characters that a header cannot")
    return serving.RequestOptions(
        Target.parse(options["base_url"]),
        options["model"],
        options["endpoint"],
        options["ignore_eos"],
        {"Authorization": f"Bearer {key}"} if key else {},
        options["timeout"],
    )


async def _drive(
    calls: list[workload.Call], request_options: serving.RequestOptions, warm_up: int, concurrency: int
) -> list[serving.Outcome]:
    """Warm up with requests like the first, one after the other; then run the test.

    Raises:
        ConfigError: the warm-up failed, so the test would fail too.
    """
    first = calls[0]
    for number in range(warm_up):
        prompt = tuple(reversed(first.prompt[number % len(first.prompt) :]))  # no prefix of the test's own prompts
        (outcome,) = await serving.drive([workload.Call(0.0, prompt, first.output_tokens)], request_options)
        if outcome.error:
            raise ConfigError("base_url", f"the warm-up request failed: {outcome.error}")
    with tqdm(total=len(calls), desc="Answered", unit="request", leave=False, disable=None) as bar:
        return await serving.drive(calls, request_options, concurrency, lambda _: bar.update())
