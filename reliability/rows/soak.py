"""R21: thousands of short mixed requests; memory, descriptors, threads and blocks stay what they were."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from harness.client import ask
from harness.processes import descriptors, own_bytes, threads, wait_until
from harness.requests import COMPLETIONS, random_request
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving
from harness.tiny import tiny_model

__all__ = ["slope", "soak"]

REQUESTS = 20_000
SAMPLES = 40
AT_ONCE = 16
MOST_BYTES_PER_100K = 20e6
CANCELS, MALFORMED = 0.05, 0.01
KINDS = ("greedy", "seeded", "choices", "stop", "penalties", "logprobs", "regex")
WRONG: tuple[Any, ...] = (
    b"{",
    {"prompt": 5.5},
    {"prompt": "x", "n": 100_000},
    {"prompt": "x", "temperatur": 1},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
)


@dataclass
class _Counts:
    statuses: dict[str, int] = field(default_factory=dict)
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)


def soak(depth: Depth, progress: Progress) -> Measured:
    """Send requests in portions, and measure memory after each; the first quarter is warm-up.

    Subtracts what the server keeps on purpose, up to a bound: mostly ids of streams that may be resumed.
    """
    count = depth.of(REQUESTS)
    progress.expect(count)
    chance, counts, samples = random.Random(11), _Counts(), []
    options = (*APART, "--kv-cache-memory", "32MiB", "--max-num-seqs", "16", "--no-prefix-caching")
    with tiny_model(1024) as model, serving(str(model), *options) as server:
        for _ in range(SAMPLES):
            asyncio.run(_portion(server, chance, count // SAMPLES, counts))
            wait_until(server.idle, 30)
            own = own_bytes(server.pid) - round(server.metric("penstock:memory_bytes"))
            samples.append((own, descriptors(server.pid), threads(server.pid)))
            progress.update(count // SAMPLES)
        idle = server.idle()
        failed = server.metric("penstock:engine_steps_failed_total")
    warm = samples[SAMPLES // 4 :]
    growth = slope([each[0] for each in warm]) / (count // SAMPLES) * 100_000
    misses = counts.wrong
    if not idle:
        misses.append("blocks are missing when all is over")
    if failed:
        misses.append(f"{failed:.0f} steps failed")
    middle = len(warm) // 2
    for which, name in ((1, "descriptors"), (2, "threads")):
        before, after = (max(each[which] for each in half) for half in (warm[:middle], warm[middle:]))
        if after > before + 1:  # a pool may start its last thread late; a leak adds more than that
            misses.append(f"{name} went from {before} to {after}")
    if depth is Depth.DEEP and growth > MOST_BYTES_PER_100K:
        misses.append(f"memory grows by {growth / 1e6:.0f} MB in 100,000 requests")
    judged = "" if depth is Depth.DEEP else " (too few to judge)"
    figure = (
        f"{count} requests: memory {growth / 1e6:+.0f} MB in 100,000{judged}; descriptors, threads, blocks as before"
    )
    return judge(figure, misses, bytes_in_100k=growth, samples=samples, statuses=counts.statuses)


async def _portion(server: Server, chance: random.Random, count: int, counts: _Counts) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(seed: float) -> None:
        async with room:
            await _one(server, random.Random(seed), counts)

    await asyncio.gather(*(one(chance.random()) for _ in range(count)))


async def _one(server: Server, chance: random.Random, counts: _Counts) -> None:
    what = chance.random()
    if what < MALFORMED:
        answer = await ask(server.url, COMPLETIONS, chance.choice(WRONG), seconds=60)
        if not 400 <= answer.status < 500:
            counts.wrong.append(f"a malformed request: {answer.describe()}")
    elif what < MALFORMED + CANCELS:
        request = random_request(chance, 40, KINDS)
        task = asyncio.ensure_future(ask(server.url, request.path, request.streamed()))
        await asyncio.sleep(chance.uniform(0, 0.05))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        counts.cancelled += 1
        return
    else:
        request = random_request(chance, 12, KINDS)
        body = request.streamed() if chance.random() < 0.5 else request.body
        answer = await ask(server.url, request.path, body, seconds=60)
        if not answer.finished:
            counts.wrong.append(f"{request.kind}: {answer.describe()}")
    counts.statuses[str(answer.status)] = counts.statuses.get(str(answer.status), 0) + 1


def slope(values: list[int]) -> float:
    """Return by how much `values` grow from one to the next, by least squares."""
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((index - middle) ** 2 for index in range(count))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread if spread else 0.0
