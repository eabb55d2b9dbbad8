"""C1: the cost of running the runner in a process of its own."""

from __future__ import annotations

import asyncio
import random
import statistics

from harness.client import ask, now
from harness.requests import COMPLETIONS
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving

__all__ = ["process"]

NEW_TOKENS = {1: 96, 8: 64, 32: 32}
"""Streams at once -> tokens of each stream, for a second or two of work."""
PROMPT_TOKENS = 32
SHARE = 0.97
OPTIONS = ("--kv-cache-memory", "256MiB", "--max-num-seqs", "32")
TOGETHER = ("--runner", "in-process")


def process(depth: Depth, progress: Progress) -> Measured:
    """Compare throughput with that of a server of one process; a round is apart, together, together, apart.

    Both get the same requests: the speed of an answer depends on how much of it repeats, and can be guessed.
    """
    rounds = depth.of(15, 3)
    progress.expect(rounds + 1)
    shares: dict[int, list[float]] = {streams: [] for streams in NEW_TOKENS}
    with serving(*OPTIONS, *APART) as apart, serving(*OPTIONS, *TOGETHER) as together:
        for round_ in range(rounds + 1):
            for streams in NEW_TOKENS:
                turns = ((apart, 0), (together, 0), (together, 1), (apart, 1))
                taken = [asyncio.run(_burst(each, streams, f"{round_} {half}")) for each, half in turns]
                if round_:
                    shares[streams].append((taken[1] + taken[2]) / (taken[0] + taken[3]))
            progress.update()
    medians = {streams: statistics.median(found) for streams, found in shares.items()}
    misses = [
        f"{streams} streams: {median:.1%} of the throughput" for streams, median in medians.items() if median < SHARE
    ]
    parts = [
        f"{medians[streams]:.1%} with {streams} streams ({min(found):.1%} to {max(found):.1%})"
        for streams, found in shares.items()
    ]
    figure = f"of the throughput in one process, medians of {rounds} rounds: {', '.join(parts)}"
    return judge(figure, misses, **{f"share_{streams}": median for streams, median in medians.items()})


async def _burst(server: Server, streams: int, seed: str) -> float:
    """Return the seconds until `streams` streams, begun at once, have ended. Each seed is new: nothing is cached."""
    chance = random.Random(f"{seed} {streams}")
    began = now()
    answers = await asyncio.gather(
        *(ask(server.url, COMPLETIONS, _body(chance, NEW_TOKENS[streams])) for _ in range(streams))
    )
    taken = now() - began
    failed = [each.describe() for each in answers if not each.finished]
    if failed:
        raise RuntimeError(f"a stream did not end well: {failed[0]}")
    return taken


def _body(chance: random.Random, new_tokens: int) -> dict[str, object]:
    prompt = [chance.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)]
    return {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
