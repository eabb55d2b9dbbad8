"""S1: streams keep a reader's pace during the prefill of long prompts, and what that costs the prompts."""

from __future__ import annotations

import asyncio
import random
import statistics
from functools import partial
from itertools import pairwise

from harness.client import Event, ask, now
from harness.processes import wait_until
from harness.requests import COMPLETIONS
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving
from rows.overload import percentile

__all__ = ["long_prompts"]

STREAMS = 4
PROMPTS = 3
PROMPT_TOKENS = 5400
SETTLED = 20
"""Tokens of each stream before the prompts are sent."""
MOST_TOKENS = 2000
PAUSE_MS = 150
DEARER = 1.10
OPTIONS = (*APART, "--kv-cache-memory", "1GiB")
WITHOUT = ("--step-target-ms", "0")


def long_prompts(depth: Depth, progress: Progress) -> Measured:
    """Play the same scene with the default step target and with none, in turns; the first round does not count."""
    rounds = depth.of(5, 1)
    progress.expect(rounds + 1)
    pauses: list[float] = []
    ratios: list[float] = []
    seconds: list[float] = []
    with serving(*OPTIONS) as server, serving(*OPTIONS, *WITHOUT) as plain:
        for round_ in range(rounds + 1):
            found, taken = asyncio.run(_scene(server, round_))
            _, taken_without = asyncio.run(_scene(plain, round_))
            if round_:
                pauses += found
                seconds.append(taken)
                ratios.append(taken / taken_without)
            progress.update()
    return _judge_scene(pauses, seconds, ratios)


async def _scene(server: Server, seed: int) -> tuple[list[float], float]:
    """Return the pauses of the streams during the prompts' prefill, and how long the prompts take; in seconds."""
    chance = random.Random(seed)
    moments: list[list[float]] = [[] for _ in range(STREAMS)]
    settled = asyncio.Event()

    def note(stream: int, event: Event) -> None:
        moments[stream].append(event.moment)
        if all(len(each) >= SETTLED for each in moments):
            settled.set()

    streams = [
        asyncio.ensure_future(
            ask(
                server.url,
                COMPLETIONS,
                _body(chance, 16, MOST_TOKENS) | {"stream": True},
                on_event=partial(note, stream),
            )
        )
        for stream in range(STREAMS)
    ]
    await asyncio.wait_for(settled.wait(), 60)
    began = now()
    answers = await asyncio.gather(
        *(ask(server.url, COMPLETIONS, _body(chance, PROMPT_TOKENS, 1)) for _ in range(PROMPTS))
    )
    ended = now()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await asyncio.to_thread(wait_until, server.idle, 30.0)
    failed = [each.describe() for each in answers if not each.finished]
    if failed:
        raise RuntimeError(f"a prompt was not read: {failed[0]}")
    return [b - a for each in moments for a, b in pairwise(each) if began <= b <= ended], ended - began


def _body(chance: random.Random, prompt_tokens: int, new_tokens: int) -> dict[str, object]:
    prompt = [chance.randrange(100, 10_000) for _ in range(prompt_tokens)]
    return {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}


def _judge_scene(pauses: list[float], seconds: list[float], ratios: list[float]) -> Measured:
    p50, p99 = (percentile(pauses, share) * 1000 for share in (0.5, 0.99))
    taken, dearer = statistics.median(seconds), statistics.median(ratios)
    misses = []
    if p99 > PAUSE_MS:
        misses.append(f"a token comes after {p99:.0f} ms (p99)")
    if dearer > DEARER:
        misses.append(f"the prompts take {dearer:.2f} times what they take without a target")
    figure = (
        f"a token every {p50:.0f} ms, p99 {p99:.0f} ms, {max(pauses) * 1000:.0f} at most; the prompts take"
        f" {taken:.1f} s, {dearer:.2f} times ({min(ratios):.2f} to {max(ratios):.2f}) what they take without a target"
    )
    return judge(figure, misses, p50_ms=p50, p99_ms=p99, prompts=taken, dearer=dearer)
