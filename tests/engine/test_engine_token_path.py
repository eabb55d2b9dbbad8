"""How far a streamed token travels: the Python frames between the engine's queue and the HTTP answer.

Each frame is run once more for every token of every stream, so a new layer in between is a decision, not an accident.
"""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from engine_harness import build

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.engine import EngineLoop, LocalClient
from penstock.engine.admission import QueueLimits
from penstock.engine.output_queue import OutputQueue
from penstock.server import create_app
from penstock.server.http.in_process import post

CARD = ModelCard("acme/tiny-1", 0, 128, 32, True)
PATH = [
    "LocalClient.generate",
    "LiveRequest.next",
    "OutputStream.stream",
    "EventDelivery.deliver",
    "EngineResponse._answer",
]
"""From the engine's queue to the task that answers; `generate` and `stream` are the only generators."""


@pytest.fixture
def client():
    bench = build()
    loop = EngineLoop(bench.engine, bench.clock, QueueLimits(100))
    loop.start()
    yield LocalClient(bench.intake, loop)
    loop.stop()


def test_a_streamed_token_passes_five_frames_two_of_them_generators(client, monkeypatch):
    paths: list[list[str]] = []
    take = OutputQueue.take

    async def watched(queue: OutputQueue):
        taken = await take(queue)
        paths.append(callers())
        return taken

    monkeypatch.setattr(OutputQueue, "take", watched)
    app = create_app(client, CARD, DEFAULT_LIMITS)
    body = json.dumps({"prompt": "hello", "max_tokens": 8, "stream": True}).encode()
    answer = asyncio.run(post(app, "/v1/completions", body))
    assert b"\ndata: [DONE]\n" in answer.body
    assert paths
    assert all(path == PATH for path in paths)


def callers() -> list[str]:
    """The coroutines and generators that wait for the caller of this, innermost first, up to the event loop."""
    frame, names = sys._getframe(2), []
    while frame is not None and frame.f_code.co_filename != asyncio.events.__file__:
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names
