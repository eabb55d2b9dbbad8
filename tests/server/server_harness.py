"""A real server on a free port, in a thread, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from scripted_engine import ScriptedEngine

from penstock.contract.journal import AnswerJournal, Journal
from penstock.contract.limits import DEFAULT_SERVER_LIMITS, RequestLimits, ServerLimits
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import ModelCard
from penstock.contract.ports import StepWatch
from penstock.contract.server_config import ServerConfig
from penstock.server import create_app
from penstock.server.http.access import Access
from penstock.server.http.run import Server
from penstock.server.http.systemd import NOBODY, Notifier

CARD = ModelCard("acme/tiny-1", 1_700_000_000, max_model_len=64, vocab_size=100, has_chat_template=True, hidden_size=2)
LIMITS = RequestLimits(max_body_bytes=64 * 1024, max_prompts=8, max_sequences=12, max_embedding_inputs=40)


@dataclass
class Served:
    """A running server, its engine, and a plain client."""

    url: str
    engine: ScriptedEngine
    http: httpx.Client

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    def chat(self, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hi"} | fields)

    def generate(self, **fields: object) -> httpx.Response:
        return self.http.post("/generate", json={"prompt": "Hi"} | fields)

    @property
    def request(self):
        return self.engine.requests[-1]


def start(
    engine: ScriptedEngine,
    card: ModelCard = CARD,
    drain_seconds: int = 1,
    access: Access | None = None,
    server_limits: ServerLimits = DEFAULT_SERVER_LIMITS,
    config: ServerConfig | None = None,
    watch: StepWatch | None = None,
    notifier: Notifier = NOBODY,
    journal: Journal | None = None,
    limits: RequestLimits = LIMITS,
    memory: MemoryBudget | None = None,
    answers: AnswerJournal | None = None,
) -> tuple[str, Server, threading.Thread]:
    """Serve in a thread; returns when connections are accepted."""
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    app = create_app(engine, card, limits, access, watch=watch, journal=journal, answers=answers, memory=memory)
    server = Server(app, config or ServerConfig(port=0), on_ready, drain_seconds, server_limits, notifier=notifier)
    thread = threading.Thread(target=lambda: asyncio.run(server.listen()))
    thread.start()
    assert ready.wait(10)
    return urls[0], server, thread


def free_port() -> int:
    """A port that is free just now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@contextmanager
def running(engine: ScriptedEngine, **options) -> Iterator[str]:
    """`start` a server, and stop it whatever happens."""
    url, server, thread = start(engine, **options)
    try:
        yield url
    finally:
        server.stop()
        thread.join(10)
    assert not thread.is_alive()
