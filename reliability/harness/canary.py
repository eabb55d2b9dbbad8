"""A request that is sent again and again while something else goes on: its answer must come, and stay the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from harness.batches import difference
from harness.client import Event, ask, now, said
from harness.requests import Request

__all__ = ["Canary", "singing"]


@dataclass
class Canary:
    """Sends the request, and records its answers.

    Attributes:
        seconds: seconds after which an answer that has not ended counts as hung.
        sung: how many answers came.
        wrong: a sentence for each answer that differs from the first.
        firsts: seconds to the first token of each answer.
        gaps: the longest pause between two events of each answer, in seconds.
    """

    request: Request
    headers: Mapping[str, str] | None = None
    seconds: float = 120.0
    sung: int = 0
    wrong: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    want: dict[str, Any] | None = None

    async def sing(self, url: str) -> None:
        """Send the request once, and read its answer."""
        moments: list[float] = []

        def note(event: Event) -> None:
            moments.append(event.moment)

        answer = await ask(url, self.request.path, self.request.streamed(), self.headers, note, seconds=self.seconds)
        self.sung += 1
        if self.want is None and answer.finished:
            self.want = said(answer)
        if found := difference(self.request, self.want or {"choices": {}, "usage": {}}, answer):
            self.wrong.append(found)
        self.firsts.append(answer.first_token)
        self.gaps.append(max((b - a for a, b in pairwise(moments)), default=0.0))


@asynccontextmanager
async def singing(canary: Canary, url: str, pause: float = 0.0) -> AsyncIterator[Canary]:
    """Send the request again and again until the block ends; the last answer is read to its end."""
    ended = asyncio.Event()

    async def go_on() -> None:
        while not ended.is_set():
            began = now()
            await canary.sing(url)
            await asyncio.sleep(max(0.0, pause - (now() - began)))

    task = asyncio.ensure_future(go_on())
    try:
        yield canary
    finally:
        ended.set()
        await task
