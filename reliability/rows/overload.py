"""R16 and R17: ten times the load that the server can serve, and one caller that floods beside callers that do not."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.client import Answer, now
from harness.processes import wait_until
from harness.requests import COMPLETIONS
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving
from harness.unread import exchange, request_bytes

__all__ = ["flood", "open_loop", "tenfold", "percentile"]

SECONDS = 180
TIMES = 10
NEW_TOKENS = 32
PROMPT_TOKENS = 64
GOODPUT = 0.95
REFUSAL_SECONDS = 0.05
QUEUE = 64
CALLERS = 32
"""Callers at the peak: as many as the requests that run at once."""
OPTIONS = (*APART, "--kv-cache-memory", "256MiB", "--max-num-seqs", str(CALLERS), "--max-queued-requests", str(QUEUE))
"""The bound on the queue keeps the wait of accepted requests short: at most this many requests wait."""


def _body(chance: random.Random) -> dict[str, Any]:
    prompt = [chance.randrange(100, 10_000) for _ in range(PROMPT_TOKENS)]
    return {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed; NaN if there are none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def _request(chance: random.Random, headers: Mapping[str, str] | None = None) -> bytes:
    return request_bytes(COMPLETIONS, _body(chance), headers)


def _peak(server: Server, seconds: float) -> tuple[float, float]:
    """Measure answers a second and p99 TTFT with as many callers as can run at once, each waiting for its answer."""
    chance, began = random.Random(1), now()

    def again() -> bytes | None:
        return _request(chance) if now() < began + seconds else None

    kept = exchange(server.url, [(0.0, _request(chance)) for _ in range(CALLERS)], again)
    took = now() - began
    return len(kept) / took, percentile([each.read().first_token for each in kept], 0.99)


def open_loop(
    request: Callable[[random.Random], bytes], rate: float, seconds: float, seed: int
) -> Iterator[tuple[float, bytes]]:
    """Yield requests at random moments, `rate` a second on average, whether others are answered or not."""
    chance, after = random.Random(seed), 0.0
    while after < seconds:
        yield after, request(chance)
        after += chance.expovariate(rate)


def tenfold(depth: Depth, progress: Progress) -> Measured:
    """R16: ten times the peak rate, in an open loop."""
    seconds = depth.of(SECONDS, 20)
    progress.expect(1)
    with serving(*OPTIONS) as server:
        peak, wait_at_peak = _peak(server, max(10.0, seconds / 4))
        planned = [*open_loop(_request, TIMES * peak, seconds, 2)]
        used, began = time.process_time(), now()
        kept = exchange(server.url, planned)
        sender = (time.process_time() - used) / (now() - began) / len(os.sched_getaffinity(0))
        back = wait_until(server.idle, 60)
    progress.update()
    answers = [each.read() for each in kept]
    return _judge_overload(answers, seconds, peak, wait_at_peak, back, sender)


def _judge_overload(
    answers: list[Answer], seconds: float, peak: float, wait_at_peak: float, back: float, sender: float
) -> Measured:
    """Judge R16; `sender` is the share of the processors that this process took from the server to send and read."""
    taken = [each for each in answers if each.finished]
    refused = [each for each in answers if each.status == 429]
    lost = [each for each in answers if not each.finished and each.status != 429]
    first, last = min(each.sent for each in answers), max(each.ended for each in taken)
    goodput, refusal = (
        len(taken) / (last - first) / peak,
        percentile([each.ended - each.sent for each in refused], 0.99),
    )
    waited = percentile([each.first_token for each in taken], 0.99)
    promise = wait_at_peak + (QUEUE + CALLERS) / peak
    misses = [f"lost: {each.describe()}" for each in lost]
    if goodput < GOODPUT:
        misses.append(f"goodput is {goodput:.0%} of the peak")
    if not refused or refusal > REFUSAL_SECONDS:
        misses.append(f"refusals take {refusal * 1000:.0f} ms (p99)")
    if any(not 1 <= int(each.headers.get("retry-after", 0)) <= 120 for each in refused):
        misses.append("a refusal has no Retry-After of 1 to 120 s")
    if waited > promise:
        misses.append(f"the first token comes after {waited:.1f} s (p99), the bound being {promise:.1f} s")
    if back > 5:
        misses.append(f"idle again after {back:.0f} s")
    figure = (
        f"{len(answers)} requests in {seconds} s: {len(taken)} answered ({goodput:.0%} of the peak),"
        f" {len(refused)} refused within {refusal * 1000:.0f} ms (p99), {len(lost)} lost; first token {waited:.1f} s"
        f" (p99); the sender takes {sender:.0%} of the processors"
    )
    values = {"goodput": goodput, "peak": peak, "refusal_p99": refusal, "first_token_p99": waited, "bound": promise}
    return judge(figure, misses, **values, sender=sender)


def flood(depth: Depth, progress: Progress) -> Measured:
    """R17: nine keys send requests now and then; one sends ten times what the server can serve."""
    seconds = depth.of(SECONDS, 20)
    progress.expect(1)
    keys = [f"tenant-{number}-of-the-row" for number in range(10)]
    with tempfile.NamedTemporaryFile("w", suffix="-keys") as file:
        file.write("\n".join(keys) + "\n")
        file.flush()
        Path(file.name).chmod(0o600)
        with serving(*OPTIONS, "--api-key-file", file.name) as server:
            capacity, quiet, loud = _flooded(server, keys, seconds)
    progress.update()
    before, beside = (percentile([each.first_token for each in part], 0.99) for part in (quiet, loud))
    failed = [each for each in loud if not each.finished]
    misses = [f"a request of a key that does not flood: {each.describe()}" for each in failed]
    if beside > 2 * before:
        misses.append(f"their first token comes after {beside:.1f} s (p99), {beside / before:.0f} times {before:.2f} s")
    refused = f"{len(failed)} of {len(loud)} refused"
    figure = f"others' first token {beside:.2f} s (p99), {before:.2f} s without the flood; {refused}"
    return judge(figure, misses, capacity=capacity, before=before, beside=beside, refused=len(failed), asked=len(loud))


def _flooded(server: Server, keys: list[str], seconds: float) -> tuple[float, list[Answer], list[Answer]]:
    """Return the server's capacity in answers a second, and the nine keys' answers without and beside the flood."""

    def of(names: list[str]) -> Callable[[random.Random], bytes]:
        return lambda chance: _request(chance, {"Authorization": f"Bearer {chance.choice(names)}"})

    began = now()
    burst = exchange(server.url, [(0.0, of(keys[:1])(random.Random(seed))) for seed in range(CALLERS)])
    capacity = len(burst) / (now() - began)
    gentle = 0.3 * capacity
    quiet = exchange(server.url, open_loop(of(keys[1:]), gentle, seconds, 3))
    flood = [*open_loop(of(keys[:1]), TIMES * capacity, seconds + 2, 4)]
    others = [(2.0 + after, request) for after, request in open_loop(of(keys[1:]), gentle, seconds, 5)]
    asked = {id(request) for _, request in others}
    loud = exchange(server.url, sorted([*flood, *others], key=lambda each: each[0]))
    beside = [each for each in loud if id(each.request) in asked]
    return capacity, [each.read() for each in quiet], [each.read() for each in beside]
