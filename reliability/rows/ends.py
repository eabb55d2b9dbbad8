"""R13 to R15, P4, R31: a runner that hangs, a server that is killed, a runner that always dies, an orderly end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from itertools import pairwise

import httpx

from harness.batches import answers_to, differences, gather
from harness.client import Answer, ask, said
from harness.processes import awaits, family, gone, wait_until
from harness.requests import COMPLETIONS, Request, mixed_requests
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving

__all__ = ["crash_loop", "hang", "orphans", "stuck_start", "termination"]

HANG_SECONDS = 5.0
START_SECONDS = 90.0
"""Far more than a model of this size takes to load."""
SMALL = (*APART, "--kv-cache-memory", "256MiB")
LONG = {"prompt": "One", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def hang(depth: Depth, progress: Progress) -> Measured:
    """R13: the runner is stopped (SIGSTOP) under streams."""
    trials = depth.of(20)
    progress.expect(trials)
    requests, misses, found = mixed_requests(8, 64), [], []
    with serving(*SMALL) as server:
        undisturbed = answers_to(server, requests)
        want = [said(each) for each in undisturbed]
        limit = max(HANG_SECONDS, 3 * _longest_step(server, undisturbed))
        for _ in range(trials):
            seconds, answers = asyncio.run(_stopped(server, requests))
            found.append(seconds)
            misses += differences(requests, want, answers)
            if seconds > limit:
                misses.append(f"found after {seconds:.2f} s, the limit being {limit:.1f} s")
            progress.update()
    figure = f"{trials} stopped runners found after {min(found):.1f} to {max(found):.1f} s, limit {limit:.1f} s"
    return judge(figure, misses, seconds=found, limit=limit)


def _longest_step(server: Server, answers: list[Answer]) -> float:
    """Measure the longest step from outside: a pause of a stream, or a prompt as large as one step."""
    body = {"prompt": [1, *range(100, 355)], "max_tokens": 1, "temperature": 0}
    began = time.monotonic()
    httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).raise_for_status()
    prompt = time.monotonic() - began
    pauses = [b.moment - a.moment for each in answers for a, b in pairwise(each.events)]
    return max(prompt, *pauses)


async def _stopped(server: Server, requests: list[Request]) -> tuple[float, list[Answer]]:
    """Return the seconds until a stopped runner is found, and the answers."""
    streams = asyncio.ensure_future(gather(server.url, requests))
    await asyncio.sleep(0.5)
    pid = server.runner()
    os.kill(pid, signal.SIGSTOP)
    # SIGABRT asks a hung runner for its stacks; it has a second to answer. A pending SIGABRT shows that it was found.
    seconds = await asyncio.to_thread(wait_until, lambda: gone(pid) or awaits(pid, signal.SIGABRT), 60.0)
    return seconds, await streams


def stuck_start(depth: Depth, progress: Progress) -> Measured:
    """P4: the runner is killed under streams, and the next runner hangs before it has loaded the model."""
    trials = depth.of(5, 1)
    progress.expect(trials)
    requests, misses, found = mixed_requests(8, 64), [], []
    with serving(*SMALL) as server:
        want = [said(each) for each in answers_to(server, requests)]
        for _ in range(trials):
            seconds, answers = asyncio.run(_stuck_anew(server, requests))
            found.append(seconds)
            misses += differences(requests, want, answers)
            if seconds > START_SECONDS:
                misses.append(f"not found within {START_SECONDS:.0f} s; the streams waited until it was let go")
            progress.update()
    figure = f"{trials} stuck starts, {sum(each <= START_SECONDS for each in found)} found within {START_SECONDS:.0f} s"
    return judge(figure, misses, found=[each for each in found if each <= START_SECONDS])


async def _stuck_anew(server: Server, requests: list[Request]) -> tuple[float, list[Answer]]:
    """Return the seconds until a runner that hangs while it loads is found (if not, it is resumed), and the answers."""
    streams = asyncio.ensure_future(gather(server.url, requests))
    await asyncio.sleep(0.5)
    before = server.runner()
    os.kill(before, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: server.runner() not in (0, before), 30.0)
    pid = server.runner()
    os.kill(pid, signal.SIGSTOP)
    seconds = await asyncio.to_thread(wait_until, lambda: gone(pid) or awaits(pid, signal.SIGABRT), START_SECONDS)
    if not gone(pid):
        os.kill(pid, signal.SIGCONT)
    return seconds, await streams


def orphans(depth: Depth, progress: Progress) -> Measured:
    """R14: the server is killed (SIGKILL): idle, at work, and while its runner restarts."""
    trials = depth.of(30, 3)
    progress.expect(trials)
    misses, found = [], []
    for trial in range(trials):
        moment = ("idle", "at work", "restarting")[trial % 3]
        with serving(*SMALL, ends_with=None) as server:
            found.append(_end_of_family(server, moment))
            if found[-1] > 2.0:
                misses.append(f"killed while {moment}: a process was left after {found[-1]:.1f} s")
            if not _can_listen(server.port):
                misses.append(f"killed while {moment}: its port cannot be used again")
        progress.update()
    return judge(
        f"{trials} killed servers, the last process gone after {max(found):.2f} s at most", misses, seconds=found
    )


def _end_of_family(server: Server, moment: str) -> float:
    """Kill the server, and wait until all processes that it had started are gone; returns the seconds."""
    if moment != "idle":
        form = {"structured_outputs": {"regex": "(yes|no)"}}
        httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "x"} | form, timeout=60)  # starts its grammar worker
        _have_at_work(server)
    if moment == "restarting":
        os.kill(server.runner(), signal.SIGKILL)
        time.sleep(random.Random(server.pid).uniform(0.2, 1.5))
    below = family(server.pid)[1:]
    server.process.kill()
    server.process.wait()
    return wait_until(lambda: all(map(gone, below)), 20.0)


def _have_at_work(server: Server) -> None:
    """Start a long answer, which a thread reads until it breaks off."""
    began = threading.Event()
    stream = ask(server.url, COMPLETIONS, LONG | {"stream": True}, on_event=lambda _: began.set())
    threading.Thread(target=asyncio.run, args=(stream,), daemon=True).start()
    if not began.wait(60):
        raise RuntimeError("an undisturbed stream did not begin within 60 s")


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def crash_loop(depth: Depth, progress: Progress) -> Measured:
    """R15: each runner is killed as soon as it exists."""
    trials = depth.of(5, 1)
    progress.expect(trials)
    misses, starts = [], []
    for _ in range(trials):
        with serving(*SMALL, ends_with=None) as server:
            killed, answer = asyncio.run(_kill_each(server))
            starts.append(len(killed))
            if server.process.wait(30) != 1:
                misses.append(f"ended with status {server.process.returncode}, not 1")
            if "times in a row" not in server.said():
                misses.append("does not say why it ended")
            if not answer.error and not answer.broken:
                misses.append("the request was answered without an error")
        progress.update()
    return judge(f"gives up after {max(starts)} processes, says why and ends with status 1", misses, starts=starts)


async def _kill_each(server: Server) -> tuple[set[int], Answer]:
    stream = asyncio.ensure_future(ask(server.url, COMPLETIONS, LONG | {"stream": True}))
    killed: set[int] = set()
    while server.process.poll() is None and len(killed) < 50:
        pid = server.runner()
        if pid and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    return killed, await stream


def termination(depth: Depth, progress: Progress) -> Measured:
    """R31: SIGTERM with 32 streams; in every second trial a second SIGTERM follows."""
    trials = depth.of(10, 2)
    progress.expect(trials)
    requests, misses, ended = mixed_requests(32, 64), [], []
    with serving(*SMALL) as server:
        want = [said(each) for each in answers_to(server, requests)]
    finished = asked = 0
    for trial in range(trials):
        with serving(*SMALL, ends_with=None) as server:
            twice = trial % 2 == 1
            seconds, answers, refused = asyncio.run(_terminated(server, requests, twice))
            ended.append(seconds)
            misses += _of_the_end(server, seconds if twice else 0.0, refused)
            if not twice:
                asked, finished = asked + len(answers), finished + sum(each.finished for each in answers)
                misses += differences(requests, want, answers)
        progress.update()
    figure = f"{finished} of {asked} streams finished; the server ended within {max(ended):.1f} s"
    return judge(figure, misses, finished=finished, asked=asked, seconds=ended)


async def _terminated(server: Server, requests: list[Request], twice: bool) -> tuple[float, list[Answer], list[str]]:
    """Return the seconds until the server had ended, the answers, and what was wrong with its refusals meanwhile."""
    streams = asyncio.ensure_future(gather(server.url, requests))
    await asyncio.sleep(1.0)
    below, began = family(server.pid)[1:], time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    wrong = await asyncio.to_thread(_takes_more, server)
    if twice:
        server.process.send_signal(signal.SIGTERM)
    answers = await streams
    await asyncio.to_thread(server.process.wait, 60)
    seconds = time.monotonic() - began
    left = await asyncio.to_thread(wait_until, lambda: all(map(gone, below)), 10.0)
    return seconds, answers, wrong + ([f"a process was left {left:.1f} s after it"] if left > 2.0 else [])


def _takes_more(server: Server) -> list[str]:
    """List what a server that is ending should refuse, and does not."""
    wrong = []
    for path, body in (("/health/ready", None), (COMPLETIONS, {"prompt": "x", "max_tokens": 1})):
        try:
            with httpx.Client(timeout=30) as client:
                answer = client.get(server.url + path) if body is None else client.post(server.url + path, json=body)
        except httpx.TransportError:  # no connection: a balancer treats that as not ready too
            continue
        if answer.status_code != 503:
            wrong.append(f"{path} was answered {answer.status_code} after SIGTERM")
        elif body is not None and "retry-after" not in answer.headers:
            wrong.append(f"{path} was refused without Retry-After after SIGTERM")
    return wrong


def _of_the_end(server: Server, seconds: float, refused: list[str]) -> list[str]:
    wrong = list(refused)
    if server.process.returncode != 0:
        wrong.append(f"ended with status {server.process.returncode}")
    if seconds > 4.0:
        wrong.append(f"took {seconds:.1f} s after a second SIGTERM")
    return wrong
