"""R12, R20 and planted faults: a marked request fails wherever it is computed, and others must not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial

from harness.batches import answers_to, differences, gather
from harness.client import Answer, ask, said
from harness.processes import wait_until
from harness.requests import COMPLETIONS, Request, mixed_requests
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, PLANTED, Server, serving
from planted.faults import mark

__all__ = ["CRASHES", "not_a_number", "out_of_memory", "poison", "stuck_kernel"]

GOOD = 31
NEW_TOKENS = 40
MOST_RESTARTS = 2
CRASHES = ("raises", "segfaults", "aborts", "exits")
RESTARTED = "a new process computes"
"""What the server's log says of each restart."""


def _try(
    faults: Sequence[str], codes: Sequence[str], most_restarts: int, depth: Depth, progress: Progress, deep: int
) -> Measured:
    """Send a request with each fault in turn among good ones; `codes` are the error codes that it may end with."""
    trials = depth.of(deep, max(len(faults), deep // 10))
    progress.expect(trials)
    requests = mixed_requests(GOOD, NEW_TOKENS)
    misses: list[str] = []
    restarts: list[int] = []
    with serving(*APART, "--kv-cache-memory", "256MiB", program=PLANTED, ends_with=None) as server:
        want = [said(each) for each in answers_to(server, requests)]
        chance = random.Random(3)
        for trial in range(trials):
            fault, before = faults[trial % len(faults)], server.said().count(RESTARTED)
            bad, answers = asyncio.run(_together(server, requests, fault, chance.uniform(0.0, 1.5)))
            restarts.append(server.said().count(RESTARTED) - before)
            misses += [f"beside one that {fault}: {each}" for each in differences(requests, want, answers)]
            misses += _of_the_bad(fault, bad, codes)
            if restarts[-1] > most_restarts:
                misses.append(f"one that {fault} cost {restarts[-1]} restarts")
            progress.update()
        for fault in dict.fromkeys(faults):  # and alone: steps of other requests would show that the runner is well
            bad, _ = asyncio.run(_together(server, [], fault, 0.0))
            misses += [f"alone: {each}" for each in _of_the_bad(fault, bad, codes)]
        if misses and wait_until(lambda: server.process.poll() is not None, 3) < 3:
            misses.append(f"the server ended with status {server.process.returncode}")
    ended = f"{trials} bad requests among {GOOD} good ones ({', '.join(dict.fromkeys(faults))})"
    figure = f"{ended}: {len(misses) or 'no'} misses, {max(restarts)} restarts at most"
    return judge(figure, misses, trials=trials, restarts=restarts)


async def _together(
    server: Server, requests: Sequence[Request], fault: str, delay: float
) -> tuple[Answer, list[Answer]]:
    """Send a marked request a while after the good ones; returns its answer, and theirs."""
    good = asyncio.ensure_future(gather(server.url, requests))
    await asyncio.sleep(delay)
    body = {"prompt": [1, 2, 3, *mark(fault)], "max_tokens": 20, "temperature": 0}
    bad = await ask(server.url, COMPLETIONS, body, seconds=240)
    return bad, await good


def _of_the_bad(fault: str, bad: Answer, codes: Sequence[str]) -> list[str]:
    """List what is wrong with the way a marked request ended."""
    code = str(bad.error.get("code"))
    if bad.status != 500 or code not in codes:
        return [f"one that {fault} ended with {bad.describe() or 'nothing'}"]
    if code == "request_poisoned" and bad.headers.get("x-should-retry") != "false":
        return [f"one that {fault} does not say that it must not be tried again"]
    return []


poison = partial(_try, CRASHES, ("request_poisoned",), MOST_RESTARTS, deep=50)
stuck_kernel = partial(_try, ("hangs", "spins"), ("request_poisoned",), MOST_RESTARTS, deep=10)
not_a_number = partial(_try, ("is not a number",), ("internal_error", "request_failed"), 0, deep=20)
out_of_memory = partial(_try, ("lacks memory", "is killed"), ("request_poisoned",), 6, deep=10)
