"""R10 and R11: the runner's process is killed while streams run; every stream continues, exact to the byte."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.batches import answers_to, differences
from harness.client import Answer, Event, ask, now, said
from harness.requests import COMPLETIONS, Request, mixed_requests
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving

__all__ = ["kills_under_streams", "restarts"]

STREAMS = 32
NEW_TOKENS = 96
FIRST_TOKEN_SECONDS = 3.0
IN_TRANSIT = 0.1
"""Seconds after a kill in which events computed before it may still come; no process starts so quickly."""


@dataclass
class _Killing:
    """Kills runners while a batch of streams runs."""

    server: Server
    chance: random.Random
    gaps: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)

    async def batch(self, requests: list[Request], kills: int, progress: Progress) -> tuple[list[Answer], int]:
        """Send all `requests`; returns the answers, and how many kills there were, at most `kills`."""
        self.events.clear()
        streams = [asyncio.ensure_future(self._stream(each)) for each in requests]
        done = 0
        while done < kills and await self._under_way(streams):
            await asyncio.sleep(self.chance.uniform(0.02, 1.0))
            pid = self.server.runner()
            if not pid or sum(not each.done() for each in streams) < len(streams) // 4:
                break
            os.kill(pid, signal.SIGKILL)
            self.gaps.append(await self._gap(now(), streams))
            done += 1
            progress.update()
        return [await each for each in streams], done

    async def _stream(self, request: Request) -> Answer:
        return await ask(self.server.url, request.path, request.streamed(), on_event=self._note)

    def _note(self, event: Event) -> None:
        self.events.append(event.moment)

    async def _under_way(self, streams: Sequence[asyncio.Future[Answer]]) -> bool:
        while not self.events:
            if all(each.done() for each in streams):
                return False
            await asyncio.sleep(0.01)
        return True

    async def _gap(self, killed: float, streams: Sequence[asyncio.Future[Answer]]) -> float:
        """Return the seconds from the kill to the first token of another process; NaN if no token was left."""
        while not self.events or self.events[-1] < killed + IN_TRANSIT:
            if all(each.done() for each in streams):
                return float("nan")
            await asyncio.sleep(0.005)
        return next(each for each in self.events if each >= killed + IN_TRANSIT) - killed


def kills_under_streams(depth: Depth, progress: Progress) -> Measured:
    """R11: batches of streams, whose runner is killed as long as at least a quarter of them run."""
    kills = depth.of(100)
    progress.expect(kills)
    requests = mixed_requests(STREAMS, NEW_TOKENS)
    misses: list[str] = []
    finished = batches = 0
    with serving(*APART, "--kv-cache-memory", "256MiB") as server:
        want = [said(each) for each in answers_to(server, requests)]
        killing = _Killing(server, random.Random(1))
        while len(killing.gaps) < kills:
            answers, _ = asyncio.run(killing.batch(requests, kills - len(killing.gaps), progress))
            batches += 1
            finished += sum(each.finished for each in answers)
            misses += differences(requests, want, answers)
        loads = _loads(server)
    gaps = sorted(each for each in killing.gaps if each == each)
    whole = f"{finished} of {batches * STREAMS} streams finished"
    figure = f"{kills} kills, {whole}, {len(misses) or 'none'} not to the byte"
    return judge(figure, misses, kills=kills, streams=batches * STREAMS, finished=finished, gaps=gaps, loads=loads)


def _loads(server: Server) -> list[float]:
    """Return the seconds that each new process took until it could compute, from the server's log; shortest first."""
    return sorted(
        float(each) for each in re.findall(r"a new process computes, pid \d+, after ([\d.]+) s", server.said())
    )


def restarts(depth: Depth, progress: Progress) -> Measured:
    """R10: one stream, then many; their runner is killed again and again."""
    kills = depth.of(20)
    progress.expect(2 * kills)
    body = {"prompt": "One", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    found: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as store,  # a server has a store by default, but not in the other rows
        serving(*APART, "--kv-cache-memory", "256MiB", "--kv-store", store) as server,
    ):
        for name, requests in {
            "one stream": [Request("greedy", COMPLETIONS, body)],
            f"{STREAMS} streams": mixed_requests(STREAMS, NEW_TOKENS),
        }.items():
            killing = _Killing(server, random.Random(2))
            while len(killing.gaps) < kills:
                asyncio.run(killing.batch(requests, kills - len(killing.gaps), progress))
            found[name] = sorted(each for each in killing.gaps if each == each)
        loads = _loads(server)
    late = [f"{name}: a token after {gaps[-1]:.1f} s" for name, gaps in found.items() if gaps[-1] > FIRST_TOKEN_SECONDS]
    figure = "; ".join(f"{name}: {_range(gaps)}" for name, gaps in found.items())
    return judge(f"{figure}; of which a new process takes {_range(loads)}", late, gaps=found, loads=loads)


def _range(gaps: list[float]) -> str:
    return f"{gaps[len(gaps) // 2]:.1f} s in the median, {gaps[-1]:.1f} s at most"
