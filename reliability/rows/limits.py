"""R18, R19, R33 and the clock: too little cache, too little time, no disk, no descriptors, a clock that jumps."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from harness.batches import answers_to, differences, gather
from harness.client import Answer, ask, now, said
from harness.processes import wait_until
from harness.requests import COMPLETIONS, Request, mixed_requests
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, PLANTED, Server, serving
from penstock.contract.config import DEFAULT_MODEL
from penstock.weights.locate import default_cache_dir
from penstock.weights.pull import pull

__all__ = ["clock_jumps", "deadlines", "disk_and_descriptors", "exhaustion", "company"]

SMALL = (*APART, "--kv-cache-memory", "128MiB")


def company(depth: Depth, progress: Progress) -> Measured:
    """R4: each request alone, then all together in a KV cache too small for them."""
    count = depth.of(500)
    progress.expect(2 * count)
    requests = mixed_requests(count, 96, seed=21)
    with serving(*SMALL, "--no-prefix-caching") as server:
        want = [_alone(server, each, progress) for each in requests]
    with serving("--kv-cache-memory", "16MiB", "--max-model-len", "512", "--max-num-batched-tokens", "96") as server:
        answers = answers_to(server, requests, 48)
        preempted, hits = (server.metric(f"vllm:{name}_total") for name in ("num_preemptions", "prefix_cache_hits"))
        progress.update(count)
    misses = differences(requests, want, answers)
    figure = (
        f"{count} requests, {len(misses) or 'none'} different; {preempted:.0f} preemptions, {hits:.0f} cached tokens"
    )
    if not preempted:
        misses.append("nobody was preempted, so the company was not hard enough")
    return judge(figure, misses, preemptions=preempted, cached_tokens=hits)


def _alone(server: Server, request: Request, progress: Progress) -> dict[str, Any]:
    answer = answers_to(server, [request])[0]
    progress.update()
    return said(answer)


def exhaustion(depth: Depth, progress: Progress) -> Measured:
    """R18: requests that need many times the KV cache, again and again."""
    rounds = depth.of(10)
    progress.expect(rounds)
    requests, misses = mixed_requests(48, 160, seed=23), []
    with serving(*SMALL) as server:
        want = [said(each) for each in answers_to(server, requests)]
    options = ("--runner", "process", "--kv-cache-memory", "16MiB", "--max-model-len", "512")
    with serving(*options) as server:
        for _ in range(rounds):
            misses += differences(requests, want, asyncio.run(gather(server.url, requests)))
            progress.update()
        if wait_until(server.idle, 30) > 30:
            misses.append("blocks are missing when all is over")
        preempted = server.metric("vllm:num_preemptions_total")
    if not preempted:
        misses.append("nobody was preempted, so the cache was not small enough")
    figure = (
        f"{rounds * len(requests)} requests finished, {len(misses) or 'none'} different; {preempted:.0f} preemptions"
    )
    return judge(figure, misses, preemptions=preempted)


DEADLINE = 2.0
LATE = 1.0
"""Seconds after the deadline that are allowed: for a step, and the machine's other work."""


def deadlines(depth: Depth, progress: Progress) -> Measured:
    """R19: requests that outlast the server's timeout or their own: running and queued, whole and streamed."""
    rounds = depth.of(10)
    progress.expect(2 * rounds)
    own = {"x-request-timeout": str(DEADLINE)}
    body = {"prompt": "One", "max_tokens": 1800, "ignore_eos": True, "temperature": 0}
    misses: list[str] = []
    seconds: list[float] = []
    for limit, headers in ((str(DEADLINE), None), ("600", own)):
        with serving(*SMALL, "--request-timeout", limit, "--max-num-seqs", "4") as server:
            for _ in range(rounds):
                answers = asyncio.run(_at_once(server, [body, body | {"stream": True}] * 5, headers))
                seconds += [each.ended - each.sent for each in answers]
                # A request that could not begin within its own timeout is refused at once.
                wrong = [each for each in answers if not (_timed_out(each) or (headers and each.status == 429))]
                misses += [f"ended with {each.describe() or 'no error'}" for each in wrong]
                if wait_until(server.idle, 10) > 1.0:
                    misses.append("blocks did not come back within 1 s")
                progress.update()
    late = max(seconds) - DEADLINE
    if late > LATE:
        misses.append(f"one ended {late:.1f} s after its deadline")
    return judge(f"{len(seconds)} requests ended {late:.2f} s after their deadline at most", misses, seconds=seconds)


def _timed_out(answer: Answer) -> bool:
    return answer.error.get("code") == "request_timeout" and answer.status in (200, 504)


async def _at_once(server: Server, bodies: list[dict[str, object]], headers: Mapping[str, str] | None) -> list[Answer]:
    return list(await asyncio.gather(*(ask(server.url, COMPLETIONS, each, headers) for each in bodies)))


Case = Callable[[ExitStack], tuple[Server, list[str]]]
"""Starts a server that lacks something, and returns it with what has gone wrong so far."""


def disk_and_descriptors(depth: Depth, progress: Progress) -> Measured:  # noqa: ARG001 (each is tried once)
    """R33: a server that lacks something answers as a server that lacks nothing."""
    cases: dict[str, Case] = {
        "the disk that --record writes to is full": _full_disk,
        "nobody reads its log": _closed_log,
        "64 descriptors": _few_descriptors,
        "a file system that cannot be written": _nowhere_to_write,
        "files may have a kilobyte": _small_files,
    }
    progress.expect(len(cases))
    requests, misses = mixed_requests(8, 24, seed=29), []
    with serving(*SMALL) as server:
        want = [said(each) for each in answers_to(server, requests)]
    for name, case in cases.items():
        try:
            with ExitStack() as stack:
                server, wrong = case(stack)
                wrong += differences(requests, want, asyncio.run(gather(server.url, requests)))
                if wait_until(server.idle, 20) > 20:
                    wrong.append("blocks are missing")
        except (RuntimeError, OSError) as error:
            wrong = [str(error)]
        misses += [f"{name}: {each}" for each in wrong]
        progress.update()
    return judge(f"{len(cases)} wants ({'; '.join(cases)}): {len(misses) or 'no'} misses", misses)


def _full_disk(stack: ExitStack) -> tuple[Server, list[str]]:
    return stack.enter_context(serving(*SMALL, "--record", "/dev/full")), []


def _closed_log(stack: ExitStack) -> tuple[Server, list[str]]:
    reader, writer = os.pipe()
    server = stack.enter_context(serving(*SMALL, "--log-requests", stderr=writer))
    os.close(writer)
    os.close(reader)
    return server, []


def _few_descriptors(stack: ExitStack) -> tuple[Server, list[str]]:
    """Open more connections than the limit and close them; the server must answer again when they are gone."""
    server = stack.enter_context(serving(*SMALL, before=_limited(resource.RLIMIT_NOFILE, 64)))
    held: list[socket.socket] = []
    with suppress(OSError):
        held.extend(socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(120))
    began = now()
    for each in held:
        each.close()
    answered = wait_until(lambda: _answers(server), 20, pause=0.2)
    return server, [] if answered < 20 else [f"no answer {now() - began:.0f} s after the connections were gone"]


def _answers(server: Server) -> bool:
    answer = asyncio.run(ask(server.url, "/health/live", seconds=2))
    return answer.status == 200


def _nowhere_to_write(stack: ExitStack) -> tuple[Server, list[str]]:
    """Put home, cache and the folder of temporary files where not even root can write."""
    model = pull(DEFAULT_MODEL, default_cache_dir(os.environ), show_progress=False)
    places = dict.fromkeys(("PENSTOCK_CACHE", "HOME", "TMPDIR", "XDG_CACHE_HOME"), "/proc/nowhere")
    return stack.enter_context(serving(str(model), *SMALL, environment=places)), []


def _small_files(stack: ExitStack) -> tuple[Server, list[str]]:
    """Imitate a disk that fills up in the middle of a record; RLIMIT_FSIZE sends SIGXFSZ, which Python ignores."""
    record = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trace"
    limit = _limited(resource.RLIMIT_FSIZE, 16 << 10)
    return stack.enter_context(serving(*SMALL, "--record", str(record), before=limit)), []


def _limited(what: int, most: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(what, (most, most))

    return limit


def clock_jumps(depth: Depth, progress: Progress) -> Measured:
    """The wall clocks of both processes jump by an hour, back and forth, while streams run."""
    jumps = depth.of(100)
    progress.expect(jumps)
    requests, misses = mixed_requests(8, 96, seed=31), []
    done = 0
    with serving(*SMALL, "--request-timeout", "60", program=PLANTED) as server:
        want = [said(each) for each in answers_to(server, requests)]
        while done < jumps:
            answers, count = asyncio.run(_jumping(server, requests, jumps - done, progress))
            done += count
            misses += differences(requests, want, answers)
            if server.health()["status"] != "ok":
                misses.append("the server is not healthy any more")
    return judge(f"{done} jumps by an hour under streams: {len(misses) or 'no'} misses", misses, jumps=done)


async def _jumping(server: Server, requests: list[Request], most: int, progress: Progress) -> tuple[list[Answer], int]:
    streams, count = asyncio.ensure_future(gather(server.url, requests)), 0
    while count < most and not streams.done():
        await asyncio.sleep(0.1)
        for pid in (server.pid, server.runner()):
            os.kill(pid, (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2, signal.SIGUSR1)[count % 4])
        count += 1
        progress.update()
    return list(await streams), count
