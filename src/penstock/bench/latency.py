"""The figures of a load test: TTFT, TPOT, ITL, E2E, throughput and goodput.

The definitions are the usual ones in published measurements; all times are in milliseconds:

    TTFT   first content - sent
    TPOT   (last content - first content) / (output tokens - 1); undefined for one token
    ITL    each gap between two events with content, pooled over all requests; an event may carry several tokens
    E2E    end of the answer - sent

Failed requests are counted, but only answered ones enter latencies, tokens and goodput. Does not know HTTP.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.bench.arithmetic import PERCENTILES, percentiles
from penstock.bench.serving import Outcome
from penstock.contract.errors import ConfigError

__all__ = ["Latency", "latency_table", "parse_goals", "request_record", "serve_summary"]

GOALS = ("ttft", "tpot", "e2e")
ALIASES = {"e2el": "e2e"}


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one answered request, in milliseconds; `tpot` is NaN for an answer of one token."""

    ttft: float
    tpot: float
    e2e: float
    itl: tuple[float, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> Latency:
        """The latencies of an outcome that did not fail."""
        first, last = outcome.content[0], outcome.content[-1]
        gaps = outcome.output_tokens - 1
        return cls(
            ttft=(first - outcome.sent) * 1e3,
            tpot=(last - first) * 1e3 / gaps if gaps > 0 else math.nan,
            e2e=(outcome.ended - outcome.sent) * 1e3,
            itl=tuple((after - before) * 1e3 for before, after in pairwise(outcome.content)),
        )

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Whether every goal is met; an undefined latency meets any."""
        return not any(getattr(self, name) > bound for name, bound in goals.items())


def parse_goals(words: Sequence[str]) -> dict[str, float]:
    """Parse goodput bounds from words such as `ttft:200` and `tpot:50`, in milliseconds.

    Raises:
        ConfigError: a word is not of that form, or a bound is given twice.
    """
    goals: dict[str, float] = {}
    for word in re.split(r"[\s,]+", " ".join(words).strip()) if words else ():
        name, _, bound = word.partition(":")
        name = ALIASES.get(name, name)
        if name not in GOALS or re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", bound) is None:
            raise ConfigError("goodput", f"{word!r} is not like ttft:200; bounds are {', '.join(GOALS)}, in ms")
        if name in goals:
            raise ConfigError("goodput", f"{name} is given twice")
        goals[name] = float(bound)
    return goals


def serve_summary(outcomes: Sequence[Outcome], goals: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a test of at least one request, as JSON.

    Throughput is over the time from sending the first request to the end of the last answer, failures included.
    """
    answered = [outcome for outcome in outcomes if not outcome.error]
    latencies = [Latency.of(outcome) for outcome in answered]
    duration = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    output = sum(outcome.output_tokens for outcome in answered)
    prompt = sum(outcome.prompt_tokens for outcome in answered)
    summary: dict[str, Any] = {
        "completed": len(answered),
        "failed": len(outcomes) - len(answered),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        "duration_s": duration,
        "requests_per_s": len(answered) / duration,
        "output_tok_s": output / duration,
        "total_tok_s": (prompt + output) / duration,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": _cached(answered),
        "tokens_counted_by": "server" if all(outcome.counted for outcome in answered) else "events",
        "send_delay_ms": percentiles([(outcome.sent - outcome.due) * 1e3 for outcome in outcomes]),
        "ttft_ms": percentiles([each.ttft for each in latencies]),
        "tpot_ms": percentiles([each.tpot for each in latencies if not math.isnan(each.tpot)]),
        "itl_ms": percentiles([gap for each in latencies for gap in each.itl]),
        "e2e_ms": percentiles([each.e2e for each in latencies]),
    }
    if goals:
        good = sum(each.meets(goals) for each in latencies)
        summary["goodput"] = {"goals_ms": dict(goals), "met": good, "requests_per_s": good / duration}
    return summary


def _cached(answered: Sequence[Outcome]) -> int | None:
    """Prompt tokens that came from the server's prefix cache; None if the server never reported them."""
    counts = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    return sum(counts) if counts else None


def request_record(outcome: Outcome) -> dict[str, Any]:
    """One request as JSON, to compute other figures from."""
    record: dict[str, Any] = {"due_s": outcome.due, "sent_s": outcome.sent, "ended_s": outcome.ended}
    record |= {"prompt_tokens": outcome.prompt_tokens, "output_tokens": outcome.output_tokens}
    record["cached_prompt_tokens"] = outcome.cached_tokens
    if outcome.error:
        return record | {"error": outcome.error}
    latency = Latency.of(outcome)
    tpot = None if math.isnan(latency.tpot) else latency.tpot
    return record | {"ttft_ms": latency.ttft, "tpot_ms": tpot, "e2e_ms": latency.e2e}


def latency_table(summary: Mapping[str, Any]) -> str:
    """The figures as a table."""
    lines = [
        f"requests            {summary['completed']} answered, {summary['failed']} failed",
        f"duration            {summary['duration_s']:.2f} s",
        f"request throughput  {summary['requests_per_s']:.2f} requests/s",
        f"token throughput    {summary['output_tok_s']:.1f} output tok/s, {summary['total_tok_s']:.1f} with prompts",
        f"tokens counted by   {summary['tokens_counted_by']}",
    ]
    if summary["cached_prompt_tokens"] is not None:
        share = summary["cached_prompt_tokens"] / max(1, summary["prompt_tokens"])
        lines.append(f"prefix cache        {summary['cached_prompt_tokens']} prompt tokens, {share:.0%} of all")
    if "goodput" in summary:
        goals = ", ".join(f"{name} <= {bound:g} ms" for name, bound in summary["goodput"]["goals_ms"].items())
        good = summary["goodput"]
        lines.append(f"goodput             {good['requests_per_s']:.2f} requests/s ({good['met']} with {goals})")
    lines += [f"failed              {count} x {error}" for error, count in summary["errors"].items()]
    return "\n".join([*lines, "", *_latency_lines(summary)])


def _latency_lines(summary: Mapping[str, Any]) -> list[str]:
    columns = ("mean", *(f"p{each}" for each in PERCENTILES))
    lines = [f"{'milliseconds':<12}" + "".join(f"{column:>11}" for column in columns)]
    for label in ("TTFT", "TPOT", "ITL", "E2E", "send delay"):
        figures = summary[f"{label.lower().replace(' ', '_')}_ms"]
        shown = (f"{figures[column]:.2f}" if figures else "-" for column in columns)
        lines.append(f"{label:<12}" + "".join(f"{each:>11}" for each in shown))
    return lines
