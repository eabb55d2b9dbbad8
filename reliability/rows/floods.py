"""D9: floods of large requests; the memory that they took is freed again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.client import Answer, ask
from harness.processes import own_bytes, wait_until
from harness.requests import CHAT, COMPLETIONS
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving
from harness.tiny import tiny_model

__all__ = ["floods"]

FLOODS = 10
WARM_UPS = 4
"""Floods before the measured ones; they fill bounded caches: compiled grammars, words of the tokenizer."""
REQUESTS = 300
"""Requests in one flood, of all kinds together."""
AT_ONCE = 24
MOST_GROWTH = 0.15
REST_SECONDS = 8.0
"""Seconds from the last answer until memory is measured: freed memory is returned after two seconds without work."""
STORES = ("requests", "outputs", "stored_responses", "stored_completions")
MIB = 1 << 20


@dataclass
class _Flood:
    """Holds the outcome of one flood."""

    stored: list[str] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def floods(depth: Depth, progress: Progress) -> Measured:
    """Compare the memory of the server and its runner at rest: after the first floods, and after more of them."""
    count = depth.of(FLOODS, quick=2)
    progress.expect((WARM_UPS + count) * REQUESTS)
    chance, misses = random.Random(9), []
    statuses: list[dict[str, int]] = []
    options = (*APART, "--kv-cache-memory", "32MiB", "--max-num-seqs", "16")
    with tiny_model() as model, serving(str(model), *options) as server:
        rests, fullest = [], 0
        for _ in range(WARM_UPS + count):
            flood, peak = asyncio.run(_flood(server, chance))
            fullest = max(fullest, peak)
            statuses.append(flood.statuses)
            misses += flood.wrong
            misses += _forget(server, flood.stored)
            rests.append(_at_rest(server))
            progress.update(REQUESTS)
        kept = {store: server.metric(f'penstock:memory_bytes{{.*store="{store}"') for store in STORES}
    before, after = rests[WARM_UPS - 1], rests[-1]
    growth = after / before - 1
    misses += [f"{size:.0f} bytes are still counted as {store}" for store, size in kept.items() if size]
    if growth > MOST_GROWTH:
        misses.append(f"memory at rest grew from {before / MIB:.0f} to {after / MIB:.0f} MiB")
    figure = (
        f"{count * REQUESTS} requests: {growth:+.1%} of {before / MIB:.0f} MiB at rest; {fullest / MIB:.0f} at most"
    )
    return judge(figure, misses, growth=growth, rests=rests, peak=fullest, statuses=statuses)


async def _flood(server: Server, chance: random.Random) -> tuple[_Flood, int]:
    flood, room = _Flood(), asyncio.Semaphore(AT_ONCE)
    peak = 0

    async def one(kind: Callable[[Server, random.Random], Awaitable[Answer | None]], seed: float) -> None:
        async with room:
            answer = await kind(server, random.Random(seed))
        if answer is None:
            return
        flood.statuses[str(answer.status)] = flood.statuses.get(str(answer.status), 0) + 1
        if answer.status not in (200, 400, 413, 429):
            flood.wrong.append(f"{kind.__name__}: {answer.describe()}")
        if answer.status == 200 and kind is _stored:
            flood.stored.append(json.loads(answer.body)["id"])

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, await asyncio.to_thread(own_bytes, server.pid))
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(one(KINDS[index % len(KINDS)], chance.random()) for index in range(REQUESTS)))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    if not flood.stored:
        flood.wrong.append("nothing was stored")
    return flood, peak


async def _long_prompt(server: Server, chance: random.Random) -> Answer:
    """Send a prompt as long as the context allows."""
    text = "".join(chance.choices("abcdefgh ", k=3500))
    return await ask(server.url, COMPLETIONS, {"prompt": text, "max_tokens": 4}, seconds=300)


async def _large_body(server: Server, chance: random.Random) -> Answer:
    """Send megabytes that grow when they are parsed, and turn out to be no valid request."""
    ids = [chance.randrange(256) for _ in range(400_000)]
    return await ask(server.url, COMPLETIONS, {"prompt": ids, "max_tokens": 4}, seconds=300)


async def _large_schema(server: Server, chance: random.Random) -> Answer:
    """Send a form that was never sent before."""
    names = [f"field_{chance.randrange(10**9)}" for _ in range(40)]
    schema = {"type": "object", "properties": {name: {"type": "string", "maxLength": 5} for name in names}}
    body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"json": schema}}
    return await ask(server.url, COMPLETIONS, body, seconds=300)


async def _stored(server: Server, chance: random.Random) -> Answer:
    """Have an answer stored, with its log probabilities."""
    body: dict[str, Any] = {"input": f"{chance.random()}", "max_output_tokens": 100, "top_logprobs": 20}
    body["include"] = ["message.output_text.logprobs"]
    return await ask(server.url, "/v1/responses", body, seconds=300)


async def _aborted(server: Server, chance: random.Random) -> None:
    """Begin a stream whose reader leaves."""
    body = {"messages": [{"role": "user", "content": f"{chance.random()}"}], "max_tokens": 2000, "stream": True}
    scored = body | {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    begun = asyncio.Event()
    task = asyncio.ensure_future(ask(server.url, CHAT, scored, on_event=lambda _: begun.set(), seconds=300))
    await asyncio.wait((task, begun_task := asyncio.ensure_future(begun.wait())), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(chance.uniform(0, 0.5))
    task.cancel()
    begun_task.cancel()
    await asyncio.gather(task, begun_task, return_exceptions=True)


KINDS = (_long_prompt, _large_body, _large_schema, _stored, _aborted)


def _forget(server: Server, stored: list[str]) -> list[str]:
    """Delete the stored answers, unless the server has dropped them already for newer ones."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        found = [http.delete(f"/v1/responses/{each}").status_code for each in stored]
    return [f"deleting a stored response: HTTP {status}" for status in set(found) - {200, 404}]


def _at_rest(server: Server) -> int:
    """Return the memory in use once the server is idle."""
    if wait_until(server.idle, 60.0) == float("inf"):
        raise RuntimeError("the server did not come to rest within a minute")
    time.sleep(REST_SECONDS)
    return own_bytes(server.pid)
